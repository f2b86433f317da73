"""FedKEI: informed starts for new diseases, mixed from a clustered pool of all hospitals' earlier modules."""
