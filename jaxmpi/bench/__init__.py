"""`jaxmpi bench`: time an exchange beside other libraries and the lower bound."""
