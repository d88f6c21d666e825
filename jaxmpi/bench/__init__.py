"""`jaxmpi bench`: how long an exchange takes, beside other libraries and the bound."""
