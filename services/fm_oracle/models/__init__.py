"""The foundation models that an oracle can serve, and how to bring one's own (entry points `veilfed.models`)."""
