"""`jaxmpi bench`: time an exchange and compare it with other libraries and the lower bound."""
