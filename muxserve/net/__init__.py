"""What processes have in common: sockets that ask for proof, messages read with care, heartbeats, signals and logs."""
