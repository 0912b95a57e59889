"""What is built on an engine: batches, benchmarks, evaluation, replays, the doctor, quantizing and converting."""
