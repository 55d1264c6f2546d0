"""What graphs are asked, without being rewritten."""
