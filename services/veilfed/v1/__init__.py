"""Generated from protos/veilfed/v1; do not edit."""
