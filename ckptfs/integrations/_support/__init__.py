"""What several frameworks' adapters share: checkpoints under given names, files, local roots."""
