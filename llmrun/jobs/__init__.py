"""Jobs that run on an engine: batches, benchmarks, evaluation, replays, the doctor, quantizing and converting."""
