// A Python module over the pure functions that the kernels share, so that tests check them without
// the hardware the kernels need. Part of development installs only.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "common/dropout.h"

namespace py = pybind11;
namespace dropout = fastattn::dropout;

namespace {

using Bytes = py::array_t<uint8_t>;
using Numbers = std::array<int64_t, dropout::kSeedAndOrigin>;

uint8_t attention_byte(const Numbers& seed, uint32_t stream, uint32_t b, uint32_t h, uint32_t i,
                       uint32_t j) {
  const dropout::Origin origin = dropout::origin_of(seed.data());
  return static_cast<uint8_t>(dropout::attention_byte(seed[0], stream, b, h, i, j, origin));
}

// Each array is filled from scalar calls: what a kernel computes with hoisted keys must equal this.
Bytes attention_bytes(const Numbers& seed, uint32_t stream, uint32_t B, uint32_t H, uint32_t M,
                      uint32_t N) {
  Bytes result({B, H, M, N});
  auto at = result.mutable_unchecked<4>();
  for (uint32_t b = 0; b < B; ++b) {
    for (uint32_t h = 0; h < H; ++h) {
      for (uint32_t i = 0; i < M; ++i) {
        for (uint32_t j = 0; j < N; ++j) {
          at(b, h, i, j) = attention_byte(seed, stream, b, h, i, j);
        }
      }
    }
  }
  return result;
}

Bytes row_bytes(int64_t seed, uint32_t stream, int64_t rows, int64_t columns) {
  Bytes result({rows, columns});
  auto at = result.mutable_unchecked<2>();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      at(r, c) = static_cast<uint8_t>(dropout::row_byte(seed, stream, r, c));
    }
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "The pure functions that fastattn's kernels share";
  m.attr("ROW_TAG") = dropout::kRowTag;
  m.attr("COLUMN_TAG") = dropout::kColumnTag;
  m.attr("SECOND_STREAM") = dropout::kSecondStream;
  m.def("finalise", &dropout::finalise<uint32_t>, py::arg("x"));
  m.def("absorb", &dropout::absorb, py::arg("state"), py::arg("value"));
  m.def("stream_key", &dropout::stream_key, py::arg("tag"), py::arg("seed"), py::arg("stream"));
  m.def("row_key", &dropout::row_key, py::arg("seed"), py::arg("stream"), py::arg("b"),
        py::arg("h"), py::arg("unit"));
  m.def("column_key", &dropout::column_key, py::arg("seed"), py::arg("stream"), py::arg("unit"));
  m.def("threshold", &dropout::threshold, py::arg("p"));
  m.def("keep_scale", &dropout::keep_scale, py::arg("threshold"));
  m.def("attention_byte", &attention_byte, py::arg("seed"), py::arg("stream"), py::arg("b"),
        py::arg("h"), py::arg("i"), py::arg("j"), "seed: the seed and its origin, five numbers");
  m.def("row_byte", &dropout::row_byte, py::arg("seed"), py::arg("stream"), py::arg("row"),
        py::arg("column"));
  m.def("attention_bytes", &attention_bytes, py::arg("seed"), py::arg("stream"), py::arg("B"),
        py::arg("H"), py::arg("M"), py::arg("N"), "uint8 [B, H, M, N]");
  m.def("row_bytes", &row_bytes, py::arg("seed"), py::arg("stream"), py::arg("rows"),
        py::arg("columns"), "uint8 [rows, columns]");
}
