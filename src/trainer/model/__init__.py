"""Building, sharding-ready models; reading and writing Hugging Face weights."""
