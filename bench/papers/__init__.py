"""What the papers show, through the real engine: figures and tables that can be checked."""
