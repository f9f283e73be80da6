#include "opcodes.h"

#include "operations.h"

namespace gpudist::ptx {

namespace {

using namespace operations;

using Table = std::map<std::string, Opcode>;

template <class T>
struct Type {
  using Of = T;
  const char* name;
};

template <class F>
void for_integers(F f) {
  f(Type<uint16_t>{"u16"}), f(Type<uint32_t>{"u32"}), f(Type<uint64_t>{"u64"});
  f(Type<int16_t>{"s16"}), f(Type<int32_t>{"s32"}), f(Type<int64_t>{"s64"});
}
template <class F>
void for_bits(F f) {
  f(Type<uint16_t>{"b16"}), f(Type<uint32_t>{"b32"}), f(Type<uint64_t>{"b64"});
}
template <class F>
void for_floats(F f) {
  f(Type<float>{"f32"}), f(Type<double>{"f64"});
}
template <class F>
void for_bytes(F f) {
  f(Type<uint8_t>{"u8"}), f(Type<int8_t>{"s8"}), f(Type<uint8_t>{"b8"});
}

template <class T>
void put_comparisons(Table& table, const std::string& type) {
  const auto put = [&](const char* name, auto with_none, auto with_and, auto with_or) {
    table[std::string("setp.") + name + "." + type] = {with_none, 3};
    table[std::string("setp.") + name + ".and." + type] = {with_and, 4};
    table[std::string("setp.") + name + ".or." + type] = {with_or, 4};
  };
#define GPUDIST_COMPARISON(name, function)                                  \
  put(name, compare<T, function<T>>, compare_and<T, function<T>, pred_and>, \
      compare_and<T, function<T>, pred_or>)
  GPUDIST_COMPARISON("eq", is_equal);
  GPUDIST_COMPARISON("ne", is_unequal);
  GPUDIST_COMPARISON("lt", is_less);
  GPUDIST_COMPARISON("le", is_less_equal);
  GPUDIST_COMPARISON("gt", is_greater);
  GPUDIST_COMPARISON("ge", is_greater_equal);
#undef GPUDIST_COMPARISON
}

void put_arithmetic(Table& table) {
  for_integers([&](auto type) {
    using T = typename decltype(type)::Of;
    const std::string name = type.name;
    table["add." + name] = {binary<T, add<T>>, 3};
    table["sub." + name] = {binary<T, subtract<T>>, 3};
    table["mul.lo." + name] = {binary<T, multiply<T>>, 3};
    table["mul.hi." + name] = {binary<T, multiply_high<T>>, 3};
    table["mad.lo." + name] = {multiply_add<T, multiply<T>, T>, 4};
    table["mad.hi." + name] = {multiply_add<T, multiply_high<T>, T>, 4};
    table["div." + name] = {binary<T, divide<T>>, 3};
    table["rem." + name] = {binary<T, remainder<T>>, 3};
    table["min." + name] = {binary<T, minimum<T>>, 3};
    table["max." + name] = {binary<T, maximum<T>>, 3};
    table["neg." + name] = {unary<T, negate<T>>, 2};
    table["abs." + name] = {unary<T, magnitude<T>>, 2};
    table["shr." + name] = {shift_right<T>, 3};
    put_comparisons<T>(table, name);
  });
  table["mul.wide.u16"] = {multiply_wide<uint16_t, uint32_t>, 3};
  table["mul.wide.s16"] = {multiply_wide<int16_t, int32_t>, 3};
  table["mul.wide.u32"] = {multiply_wide<uint32_t, uint64_t>, 3};
  table["mul.wide.s32"] = {multiply_wide<int32_t, int64_t>, 3};
  table["mad.wide.u16"] = {multiply_wide_add<uint16_t, uint32_t>, 4};
  table["mad.wide.s16"] = {multiply_wide_add<int16_t, int32_t>, 4};
  table["mad.wide.u32"] = {multiply_wide_add<uint32_t, uint64_t>, 4};
  table["mad.wide.s32"] = {multiply_wide_add<int32_t, int64_t>, 4};
  for_floats([&](auto type) {
    using T = typename decltype(type)::Of;
    const std::string name = type.name;
    table["add." + name] = {binary<T, add<T>>, 3};
    table["sub." + name] = {binary<T, subtract<T>>, 3};
    table["mul." + name] = {binary<T, multiply<T>>, 3};
    table["div." + name] = {binary<T, divide<T>>, 3};
    table["neg." + name] = {unary<T, negative<T>>, 2};
    table["sqrt." + name] = {unary<T, square_root<T>>, 2};
    table["fma." + name] = {fused_multiply_add<T>, 4};
    table["setp.nan." + name] = {compare<T, is_unordered<T>>, 3};
    table["setp.num." + name] = {compare<T, is_ordered<T>>, 3};
    table["setp.ltu." + name] = {compare<T, is_not<T, is_greater_equal<T>>>, 3};
    table["setp.leu." + name] = {compare<T, is_not<T, is_greater<T>>>, 3};
    table["setp.gtu." + name] = {compare<T, is_not<T, is_less_equal<T>>>, 3};
    table["setp.geu." + name] = {compare<T, is_not<T, is_less<T>>>, 3};
    table["setp.equ." + name] = {compare<T, is_not<T, is_unequal<T>>>, 3};
    table["setp.neu." + name] = {compare<T, is_not<T, is_equal<T>>>, 3};
    put_comparisons<T>(table, name);
  });
}

void put_bits(Table& table) {
  for_bits([&](auto type) {
    using T = typename decltype(type)::Of;
    const std::string name = type.name;
    table["and." + name] = {binary<T, bit_and<T>>, 3};
    table["or." + name] = {binary<T, bit_or<T>>, 3};
    table["xor." + name] = {binary<T, bit_xor<T>>, 3};
    table["not." + name] = {unary<T, bit_not<T>>, 2};
    table["shl." + name] = {shift_left<T>, 3};
    table["shr." + name] = {shift_right<T>, 3};
    put_comparisons<T>(table, name);
  });
  table["and.pred"] = {binary<bool, pred_and>, 3};
  table["or.pred"] = {binary<bool, pred_or>, 3};
  table["xor.pred"] = {binary<bool, pred_xor>, 3};
  table["not.pred"] = {unary<bool, pred_not>, 2};
  table["bfi.b32"] = {insert_bits<uint32_t>, 5};
  table["bfi.b64"] = {insert_bits<uint64_t>, 5};
  table["bfe.u32"] = {extract_bits<uint32_t>, 4};
  table["bfe.s32"] = {extract_bits<int32_t>, 4};
  table["bfe.u64"] = {extract_bits<uint64_t>, 4};
  table["bfe.s64"] = {extract_bits<int64_t>, 4};
  table["brev.b32"] = {unary<uint32_t, reverse_bits>, 2};
  table["prmt.b32"] = {permute_bytes, 4};
  table["lop3.b32"] = {logic_of_three, 5};
  table["shf.l.wrap.b32"] = {funnel_shift<true, true>, 4};
  table["shf.l.clamp.b32"] = {funnel_shift<true, false>, 4};
  table["shf.r.wrap.b32"] = {funnel_shift<false, true>, 4};
  table["shf.r.clamp.b32"] = {funnel_shift<false, false>, 4};
}

void put_moves(Table& table) {
  const auto put = [&](auto type) {
    using T = typename decltype(type)::Of;
    table[std::string("mov.") + type.name] = {copy<T>, 2};
    table[std::string("selp.") + type.name] = {select<T>, 4};
  };
  for_integers(put), for_bits(put), for_floats(put);
  table["mov.pred"] = {copy<bool>, 2};
  table["mov.b32.pack2"] = {pack<2, 16>, 3};
  table["mov.b32.unpack2"] = {unpack<2, 16>, 3};
  table["mov.b64.pack2"] = {pack<2, 32>, 3};
  table["mov.b64.unpack2"] = {unpack<2, 32>, 3};
  table["mov.b64.pack4"] = {pack<4, 16>, 5};
  table["mov.b64.unpack4"] = {unpack<4, 16>, 5};
  // All memory spaces share one address space here.
  for (const char* const space : {"global", "shared", "param", "local", "const"}) {
    for (const char* const to : {".", ".to."}) {
      for (const char* const type : {".u64", ".u32"}) {
        table[std::string("cvta") + to + space + type] = {copy<uint64_t>, 2};
      }
    }
  }
}

void put_conversions(Table& table) {
  const auto put = [&](auto to) {
    const auto put_from = [&](auto from) {
      using To = typename decltype(to)::Of;
      using From = typename decltype(from)::Of;
      table[std::string("cvt.") + to.name + "." + from.name] = {convert<To, From>, 2};
    };
    for_integers(put_from), for_bytes(put_from);
  };
  for_integers(put), for_bytes(put);
  for_floats([&](auto to) {
    for_integers([&](auto from) {
      using To = typename decltype(to)::Of;
      using From = typename decltype(from)::Of;
      table[std::string("cvt.rn.") + to.name + "." + from.name] = {convert<To, From>, 2};
    });
  });
  table["rcp.f64"] = {unary<double, reciprocal>, 2};
  table["cvt.f64.f32"] = {convert<double, float>, 2};
  table["cvt.rn.f32.f64"] = {round_to_float, 2};
  table["cvt.f32.f16"] = {convert_by<float, uint16_t, widen_half>, 2};
  table["cvt.rn.f16.f32"] = {convert_by<uint16_t, float, narrow_half>, 2};
  table["cvt.rn.f16x2.f32"] = {narrow_two<narrow_half>, 3};
  table["cvt.f32.bf16"] = {convert_by<float, uint16_t, widen_bfloat>, 2};
  table["cvt.rn.bf16.f32"] = {convert_by<uint16_t, float, narrow_bfloat>, 2};
  table["cvt.rn.bf16x2.f32"] = {narrow_two<narrow_bfloat>, 3};
}

template <Space kSpace>
void put_memory(Table& table, const std::string& space) {
  const auto put = [&](auto type) {
    using T = typename decltype(type)::Of;
    const std::string name = type.name;
    table["ld" + space + "." + name] = {load<T, 1, kSpace>, 2};
    table["ld" + space + ".v2." + name] = {load<T, 2, kSpace>, 3};
    table["ld" + space + ".v4." + name] = {load<T, 4, kSpace>, 5};
    table["st" + space + "." + name] = {store<T, 1, kSpace>, 2};
    table["st" + space + ".v2." + name] = {store<T, 2, kSpace>, 3};
    table["st" + space + ".v4." + name] = {store<T, 4, kSpace>, 5};
  };
  for_integers(put), for_bits(put), for_floats(put), for_bytes(put);
}

Table make_table() {
  Table table;
  put_arithmetic(table);
  put_bits(table);
  put_moves(table);
  put_conversions(table);
  put_memory<Space::kGeneric>(table, "");
  put_memory<Space::kParameter>(table, ".param");
  put_memory<Space::kGlobal>(table, ".global");
  put_memory<Space::kShared>(table, ".shared");
  table["bra"] = {branch, 0};
  // Used by mutants only.
  table["nop"] = {do_nothing, 0};
  table["random.1"] = {leave_random_bits<1>, 1};
  table["random.2"] = {leave_random_bits<2>, 2};
  table["random.4"] = {leave_random_bits<4>, 4};
  table["ret"] = {finish, 0};
  table["exit"] = {finish, 0};
  for (const char* const name : {"bar.sync", "barrier.sync"}) table[name] = {wait_for_block, 1};
  return table;
}

}  // namespace

const std::map<std::string, Opcode>& opcodes() {
  static const Table table = make_table();
  return table;
}

}  // namespace gpudist::ptx
