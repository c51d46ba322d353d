"""What grows, drifts or bursts under load: long runs, and sizes that tests never have."""
