"""Pure torch algorithms; imports nothing else of verl_omni."""
