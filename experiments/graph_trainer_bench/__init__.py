"""Step time and bytes of torchtitan's trainers, side by side."""
