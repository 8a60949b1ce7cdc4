"""What several frameworks' adapters share: names, files, local roots, steps of several groups."""
