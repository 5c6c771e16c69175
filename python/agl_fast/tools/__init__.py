"""Side tools on recordings and checkpoints: analyze, dry run, replay, export."""
