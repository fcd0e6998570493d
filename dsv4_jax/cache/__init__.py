"""The hybrid cache as a value: schemas, pools, handles, flush, manager."""
