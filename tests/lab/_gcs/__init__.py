"""The parts of the GCS test server; ``tests.lab.gcs_server`` puts them together."""
