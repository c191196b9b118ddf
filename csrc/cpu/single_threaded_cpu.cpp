// libstdc++ reads this flag of glibc 2.32 to count references without atomics while a process has
// one thread. The library defines it itself, as "there may be several", so that glibc 2.27 is
// enough.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
