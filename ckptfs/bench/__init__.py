"""Measuring: workloads, engines beside each other, results that carry what they were measured on."""
