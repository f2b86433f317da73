"""What travels between server and sites: methods' contracts, message headers, the exchange of tensors."""
