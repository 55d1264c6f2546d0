"""TorchRec compiled whole, with all passes, against TorchRec eager."""
