"""`python -m jaxmpi.train EXPERIMENT.py`: train over all workers of a job."""

from jaxmpi.trainer.main import main

if __name__ == "__main__":
    main()
