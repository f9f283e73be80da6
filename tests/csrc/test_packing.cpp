// Gather, scatter and scatter-add of random boxes compared with plain loops over the indices.
#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "core/errors.h"
#include "core/half.h"
#include "core/packing.h"
#include "test.h"

namespace {

using namespace gpudist;

void add_all(const char* source, const std::vector<BoxView>& from, char* target,
             const std::vector<BoxView>& to, Dtype dtype) {
  int64_t bytes = 0;
  for (const BoxView& box : from) bytes += box.bytes();
  BoxStream in(&from), out(&to);
  add_cells(source, in, target, out, bytes, dtype);
}

std::mt19937_64 random_bits(11);

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

// A tensor with its own memory, dims in any order and gaps between rows.
struct Tensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  int64_t item_bytes = 1;
  std::vector<uint64_t> memory;  // aligned for every dtype except the widest, complex128

  char* data() { return reinterpret_cast<char*>(memory.data()); }
  const char* data() const { return reinterpret_cast<const char*>(memory.data()); }
  int64_t bytes() const { return static_cast<int64_t>(memory.size() * 8); }
};

Tensor random_tensor(const std::vector<int64_t>& shape, int64_t item_bytes) {
  Tensor tensor{shape, std::vector<int64_t>(shape.size()), item_bytes, {}};
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (between(0, 1) == 0) std::shuffle(order.begin(), order.end(), random_bits);
  int64_t stride = between(0, 4) == 0 ? 2 : 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    tensor.strides[*d] = stride;
    stride *= std::max<int64_t>(shape[*d], 1);
    if (between(0, 3) == 0) stride += between(1, 3);
  }
  tensor.memory.resize((stride * item_bytes + 7) / 8 + 2);
  for (uint64_t& word : tensor.memory) word = random_bits();
  return tensor;
}

struct Box {
  std::vector<int64_t> start, stop;
};

Box random_box(const std::vector<int64_t>& shape) {
  Box box;
  for (int64_t extent : shape) {
    int64_t a = between(0, extent), b = between(0, extent);
    if (between(0, 2) == 0) a = 0, b = extent;
    box.start.push_back(std::min(a, b));
    box.stop.push_back(std::max(a, b));
  }
  return box;
}

std::vector<int64_t> random_shape() {
  std::vector<int64_t> shape(between(0, 5));
  for (int64_t& extent : shape) extent = between(1, shape.size() > 3 ? 4 : 9);
  return shape;
}

BoxView view_of(const Tensor& tensor, const Box& box) {
  return make_box_view(static_cast<int>(tensor.shape.size()), box.start.data(), box.stop.data(),
                       tensor.strides.data(), tensor.item_bytes);
}

// Call f(byte offset) for every item of the box, the last dim fastest.
template <class F>
void each_item(const Tensor& tensor, const Box& box, F f) {
  const size_t dims = box.start.size();
  for (size_t d = 0; d < dims; ++d) {
    if (box.start[d] == box.stop[d]) return;
  }
  std::vector<int64_t> index = box.start;
  while (true) {
    int64_t offset = 0;
    for (size_t d = 0; d < dims; ++d) offset += index[d] * tensor.strides[d] * tensor.item_bytes;
    f(offset);
    size_t d = dims;
    while (d > 0 && ++index[d - 1] == box.stop[d - 1]) {
      index[d - 1] = box.start[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

std::vector<char> plainly_gathered(const Tensor& tensor, const std::vector<Box>& boxes) {
  std::vector<char> packed;
  for (const Box& box : boxes) {
    each_item(tensor, box, [&](int64_t offset) {
      packed.insert(packed.end(), tensor.data() + offset,
                    tensor.data() + offset + tensor.item_bytes);
    });
  }
  return packed;
}

// Cut `bytes` at random multiples of `unit`.
std::vector<size_t> random_chunks(size_t bytes, size_t unit) {
  std::vector<size_t> chunks;
  while (bytes > 0) {
    const size_t most = bytes / unit;
    chunks.push_back(unit * between(1, std::max<int64_t>(1, between(0, 1) ? most : most / 5)));
    bytes -= chunks.back();
  }
  return chunks;
}

// Rows that begin and end anywhere in a line of the cache.
void scatters_past_the_cache() {
  for (size_t before = 0; before < 70; ++before) {
    for (size_t bytes : {4095 + before, 4096 + before, 9000 - before}) {
      std::vector<char> source(bytes), target(before + bytes + 70, 'x');
      for (char& byte : source) byte = static_cast<char>(random_bits());
      const int64_t start = static_cast<int64_t>(before), stop = start + bytes, stride = 1;
      const std::vector<BoxView> boxes{make_box_view(1, &start, &stop, &stride, 1)};
      BoxStream(&boxes).scatter(target.data(), source.data(), bytes, true);
      std::vector<char> expected(target.size(), 'x');
      std::copy(source.begin(), source.end(), expected.begin() + start);
      CHECK(target == expected);
    }
  }
}

void gathers_and_scatters() {
  for (int round = 0; round < 3000; ++round) {
    const std::vector<int64_t> shape = random_shape();
    const int64_t item = std::vector<int64_t>{1, 2, 4, 8, 16}[between(0, 4)];
    const Tensor tensor = random_tensor(shape, item);
    std::vector<Box> boxes(between(0, 4));
    std::vector<BoxView> views;
    int64_t rows_bytes = 0;
    for (Box& box : boxes) {
      box = random_box(shape);
      views.push_back(view_of(tensor, box));
      rows_bytes += views.back().bytes();
      if (views.back().rows > 0) {
        RowCursor cursor(views.back());
        for (int64_t row = 0; !cursor.done(); cursor.next(), ++row) {
          if (cursor.offset() != views.back().row_offset(row)) CHECK(false);
        }
      }
    }
    const std::vector<char> expected = plainly_gathered(tensor, boxes);
    CHECK(rows_bytes == static_cast<int64_t>(expected.size()));

    std::vector<char> packed(expected.size());
    BoxStream gather(&views);
    size_t place = 0;
    for (size_t chunk : random_chunks(packed.size(), 1)) {
      gather.gather(tensor.data(), packed.data() + place, chunk);
      place += chunk;
    }
    CHECK(packed == expected);
    CHECK(gather.done());

    // Scatter into another tensor of the same shape: the box is restored, and all else is
    // unchanged.
    Tensor target = random_tensor(shape, item);
    Tensor plain = target;
    size_t read = 0;
    std::vector<BoxView> target_views;
    for (const Box& box : boxes) {
      target_views.push_back(view_of(target, box));
      each_item(plain, box, [&](int64_t offset) {
        std::memcpy(plain.data() + offset, expected.data() + read, item);
        read += item;
      });
    }
    BoxStream scatter(&target_views);
    place = 0;
    for (size_t chunk : random_chunks(packed.size(), 1)) {
      scatter.scatter(target.data(), packed.data() + place, chunk);
      place += chunk;
    }
    CHECK(target.memory == plain.memory);

    Tensor copied = random_tensor(shape, item);
    Tensor copied_plainly = copied;
    std::vector<BoxView> copied_views;
    for (const Box& box : boxes) {
      copied_views.push_back(view_of(copied, box));
      std::vector<int64_t> from;
      each_item(tensor, box, [&](int64_t offset) { from.push_back(offset); });
      size_t i = 0;
      each_item(copied, box, [&](int64_t offset) {
        std::memcpy(copied_plainly.data() + offset, tensor.data() + from[i++], item);
      });
    }
    copy_boxes(tensor.data(), views, copied.data(), copied_views);
    CHECK(copied.memory == copied_plainly.memory);
  }
}

template <class T>
T item_at(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

// Sum of one item and one cell, as defined for the dtype.
template <class Cell, class Item>
void add_plainly(char* cell, const char* item, Cell (*widen)(Item)) {
  const Cell sum = static_cast<Cell>(item_at<Cell>(cell) + widen(item_at<Item>(item)));
  std::memcpy(cell, &sum, sizeof(sum));
}

template <class T>
T same(T value) {
  return value;
}

template <class Cell, class Item>
void adds(Dtype dtype, Cell (*widen)(Item), Cell (*random_cell)(), Item (*random_item)()) {
  for (int round = 0; round < 300; ++round) {
    const std::vector<int64_t> shape = random_shape();
    Tensor source = random_tensor(shape, sizeof(Item));
    Tensor target = random_tensor(shape, sizeof(Cell));
    for (int64_t i = 0; i + static_cast<int64_t>(sizeof(Item)) <= source.bytes();
         i += sizeof(Item)) {
      const Item item = random_item();
      std::memcpy(source.data() + i, &item, sizeof(item));
    }
    for (int64_t i = 0; i + static_cast<int64_t>(sizeof(Cell)) <= target.bytes();
         i += sizeof(Cell)) {
      const Cell cell = random_cell();
      std::memcpy(target.data() + i, &cell, sizeof(cell));
    }
    // Boxes may overlap; they are added one after the other.
    std::vector<Box> boxes(between(1, 4));
    std::vector<BoxView> from, to;
    for (Box& box : boxes) {
      box = random_box(shape);
      from.push_back(view_of(source, box));
      to.push_back(view_of(target, box));
    }
    const std::vector<char> items = plainly_gathered(source, boxes);
    Tensor plain = target;
    size_t read = 0;
    for (const Box& box : boxes) {
      each_item(plain, box, [&](int64_t offset) {
        add_plainly(plain.data() + offset, items.data() + read, widen);
        read += sizeof(Item);
      });
    }
    Tensor streamed = target;
    BoxStream stream(&to);
    std::vector<uint64_t> aligned(items.size() / 8 + 2);
    size_t place = 0;
    for (size_t chunk : random_chunks(items.size(), sizeof(Item))) {
      std::memcpy(aligned.data(), items.data() + place, chunk);
      stream.scatter_add(streamed.data(), reinterpret_cast<const char*>(aligned.data()), chunk,
                         dtype);
      place += chunk;
    }
    CHECK(streamed.memory == plain.memory);
    add_all(source.data(), from, target.data(), to, dtype);
    CHECK(target.memory == plain.memory);
  }
}

template <class T>
T any_integer() {
  return static_cast<T>(random_bits());
}

template <class T>
T any_float() {
  return static_cast<T>(std::uniform_real_distribution<double>(-1e6, 1e6)(random_bits));
}

template <class T>
std::complex<T> any_complex() {
  return {any_float<T>(), any_float<T>()};
}

uint16_t any_half() {
  return float_to_float16(any_float<float>() * 1e-2f);
}
uint16_t any_brain() {
  return float_to_bfloat16(any_float<float>());
}

// Sums of integers wrap, so the plain loop uses unsigned types.
void adds_every_dtype() {
  adds<uint8_t, uint8_t>(Dtype::kUint8, same, any_integer, any_integer);
  adds<uint8_t, uint8_t>(Dtype::kInt8, same, any_integer, any_integer);
  adds<uint16_t, uint16_t>(Dtype::kInt16, same, any_integer, any_integer);
  adds<uint32_t, uint32_t>(Dtype::kInt32, same, any_integer, any_integer);
  adds<uint64_t, uint64_t>(Dtype::kInt64, same, any_integer, any_integer);
  adds<float, uint16_t>(Dtype::kFloat16, float16_to_float, any_float, any_half);
  adds<float, uint16_t>(Dtype::kBfloat16, bfloat16_to_float, any_float, any_brain);
  adds<float, float>(Dtype::kFloat32, same, any_float, any_float);
  adds<double, double>(Dtype::kFloat64, same, any_float, any_float);
  adds<std::complex<float>, std::complex<float>>(Dtype::kComplex64, same, any_complex, any_complex);
  adds<std::complex<double>, std::complex<double>>(Dtype::kComplex128, same, any_complex,
                                                   any_complex);
  bool refused = false;
  try {
    char cell = 0, item = 1;
    BoxView one;
    one.row_bytes = one.rows = 1;
    const std::vector<BoxView> boxes{one};
    add_all(&item, boxes, &cell, boxes, Dtype::kBool);
  } catch (const TransportError&) {
    refused = true;
  }
  CHECK(refused);
}

// A row contiguous on one side and fragmented on the other, longer than any intermediate buffer.
void copies_rows_of_different_lengths() {
  const std::vector<int64_t> shape{37, 64, 5};
  Tensor whole{shape, {320, 5, 1}, 4, std::vector<uint64_t>(37 * 160)};
  Tensor turned{shape, {1, 37 * 5, 37}, 4, std::vector<uint64_t>(37 * 160)};
  for (uint64_t& word : whole.memory) word = random_bits() & 0x3fffffff3fffffffu;
  const Box all{{0, 0, 0}, shape};
  const std::vector<BoxView> a{view_of(whole, all)}, b{view_of(turned, all)};
  CHECK(a[0].row_bytes != b[0].row_bytes);
  copy_boxes(whole.data(), a, turned.data(), b);
  CHECK(plainly_gathered(whole, {all}) == plainly_gathered(turned, {all}));
  Tensor back = whole;
  std::fill(back.memory.begin(), back.memory.end(), 0);
  copy_boxes(turned.data(), b, back.data(), a);
  CHECK(back.memory == whole.memory);
  add_all(turned.data(), b, back.data(), a, Dtype::kInt32);
  bool doubled = true;
  for (size_t i = 0; i < back.memory.size(); ++i) doubled &= back.memory[i] == 2 * whole.memory[i];
  CHECK(doubled);
}

// A cell that several indices share, as in an expanded tensor, is read several times.
void gathers_expanded_cells() {
  const float cells[3] = {1, 2, 3};
  const int64_t start[3] = {0, 0, 0}, stop[3] = {4, 3, 5}, strides[3] = {0, 1, 0};
  const std::vector<BoxView> boxes{make_box_view(3, start, stop, strides, 4)};
  float packed[60];
  BoxStream(&boxes).gather(reinterpret_cast<const char*>(cells), reinterpret_cast<char*>(packed),
                           240);
  bool fine = true;
  for (int i = 0; i < 60; ++i) fine &= packed[i] == cells[i / 5 % 3];
  CHECK(fine);
}

void refuses_more_bytes_than_boxes() {
  const int64_t start = 0, stop = 4, stride = 1;
  const std::vector<BoxView> boxes{make_box_view(1, &start, &stop, &stride, 1)};
  char from[8] = {}, to[8] = {};
  bool refused = false;
  try {
    BoxStream(&boxes).gather(from, to, 5);
  } catch (const TransportError&) {
    refused = true;
  }
  CHECK(refused);
}

template <class T>
void fills(Dtype dtype, double value, T expected) {
  CHECK(item_bytes(dtype) == static_cast<int64_t>(sizeof(T)));
  // Columns 1 and 2 of six rows of four.
  const int64_t start[2] = {0, 1}, stop[2] = {6, 3}, strides[2] = {4, 1};
  std::vector<T> cells(24, T(1)), wanted = cells;
  for (int i = 0; i < 24; ++i) {
    if (i % 4 == 1 || i % 4 == 2) wanted[i] = expected;
  }
  const BoxView box = make_box_view(2, start, stop, strides, sizeof(T));
  fill(reinterpret_cast<char*>(cells.data()), box, dtype, value);
  CHECK(cells == wanted);
  fill(nullptr, make_box_view(2, start, start, strides, sizeof(T)), dtype, value);
}

void fills_every_dtype() {
  const float infinity = std::numeric_limits<float>::infinity();
  fills<uint8_t>(Dtype::kBool, 0.5, 1);
  fills<uint8_t>(Dtype::kUint8, 200, 200);
  fills<int8_t>(Dtype::kInt8, -3, -3);
  fills<int16_t>(Dtype::kInt16, -300, -300);
  fills<int32_t>(Dtype::kInt32, -70000, -70000);
  fills<int64_t>(Dtype::kInt64, 1e12, 1000000000000);
  fills<uint16_t>(Dtype::kFloat16, 1.5, 0x3e00);
  fills<uint16_t>(Dtype::kFloat16, -infinity, 0xfc00);
  fills<uint16_t>(Dtype::kBfloat16, -2, 0xc000);
  fills<float>(Dtype::kFloat32, -infinity, -infinity);
  fills<float>(Dtype::kFloat32, 0, 0);
  fills<double>(Dtype::kFloat64, 0.1, 0.1);
  fills<std::complex<float>>(Dtype::kComplex64, 2.5, {2.5f, 0});
  fills<std::complex<double>>(Dtype::kComplex128, -0.1, {-0.1, 0});
}

void narrows_once() {
  const float sums[3] = {260.0f, 65519.0f, 1.0f / 3};
  uint16_t half[3], brain[3];
  narrow(sums, reinterpret_cast<char*>(half), 3, Dtype::kFloat16);
  narrow(sums, reinterpret_cast<char*>(brain), 3, Dtype::kBfloat16);
  for (int i = 0; i < 3; ++i) {
    CHECK(half[i] == float_to_float16(sums[i]));
    CHECK(brain[i] == float_to_bfloat16(sums[i]));
  }
}

}  // namespace

void test_packing() {
  gathers_and_scatters();
  scatters_past_the_cache();
  adds_every_dtype();
  copies_rows_of_different_lengths();
  gathers_expanded_cells();
  refuses_more_bytes_than_boxes();
  fills_every_dtype();
  narrows_once();
}
