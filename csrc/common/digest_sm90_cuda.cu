// The digest that setup.py computes of a GPU library's sources, and the compiler.
// fastattn/ops/_verified.py looks for this text in the library's file.
#define FASTATTN_TEXT_OF(...) #__VA_ARGS__
#define FASTATTN_TEXT(...) FASTATTN_TEXT_OF(__VA_ARGS__)
#define FASTATTN_NVCC __CUDACC_VER_MAJOR__.__CUDACC_VER_MINOR__.__CUDACC_VER_BUILD__

extern "C" __attribute__((used, visibility("default"))) const char fastattn_sources[] =
    FASTATTN_TEXT(fastattn sources FASTATTN_DIGEST, nvcc FASTATTN_NVCC);
