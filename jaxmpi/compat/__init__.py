"""APIs of other libraries on jaxmpi: programs change only their import line. It imports `collectives`."""
