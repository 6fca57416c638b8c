"""Training of drafters: texts that the target wrote, losses, trainers, export."""
