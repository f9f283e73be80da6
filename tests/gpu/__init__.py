# Variable with the number of GPUs that a run over the doubles is to pretend.
REHEARSED = "REHEARSED_GPUS"
