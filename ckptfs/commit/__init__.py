"""The commit protocol: generators that yield storage operations, and who runs them. No torch."""
