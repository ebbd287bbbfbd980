"""Sans-I/O pieces that several protocols share."""
