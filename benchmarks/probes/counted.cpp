// What callgrind is to count of a Python program (--toggle-collect): `ctypes.PyDLL(...).brimful_bench_run(step)`.

// Valgrind reads names only from libraries that have data.
extern "C" __attribute__((visibility("default"))) volatile int brimful_bench_steps = 1;

extern "C" __attribute__((noinline)) void brimful_bench_step(void (*step)()) {
  step();
  brimful_bench_steps = brimful_bench_steps + 1;
}

/// ctypes does not call as compilers do, and callgrind does not see it.
extern "C" __attribute__((visibility("default"))) void brimful_bench_run(void (*step)()) {
  brimful_bench_step(step);
  brimful_bench_steps = brimful_bench_steps + 1;
}
