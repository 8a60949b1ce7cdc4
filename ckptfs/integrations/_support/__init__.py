"""What several frameworks' adapters stand on: checkpoints whose names a framework decides, files, local roots."""
