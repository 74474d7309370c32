"""Result files of benchmarks and evaluations, and the tables rendered from them."""
