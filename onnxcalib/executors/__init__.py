"""Where independent jobs run: threads and processes of this machine, a Dask cluster, or an executor of the user's."""
