"""Scheduling: which sequences run next, and by how many tokens. Policy only: no tensor library here."""
