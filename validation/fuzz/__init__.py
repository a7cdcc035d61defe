"""Random programs: tiny models x plans x meshes x options, each against eager torch: `python -m validation.fuzz`."""
