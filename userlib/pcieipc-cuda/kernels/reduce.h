// SPDX-License-Identifier: MIT OR Apache-2.0
// Element types and operations. Ranks are always added in rank order, 16-bit floats in f32 with one rounding at the end, so
// that every rank and every algorithm gives the same bits.
#pragma once
#include "protocol.h"

namespace pcieipc {

enum Op : u32 { SUM = 0, AVERAGE = 1, PRODUCT = 2, MINIMUM = 3, MAXIMUM = 4 };

struct Bf16 { u16 bits; };
struct F16 { u16 bits; };

template <class E> struct Number { typedef E Acc; PCIEIPC_FN static E widen(E e) { return e; } PCIEIPC_FN static E narrow(E a) { return a; } };
template <> struct Number<Bf16> {
  typedef float Acc;
  PCIEIPC_FN static float widen(Bf16 e) { return from_bits_f32((u32)e.bits << 16); }
  PCIEIPC_FN static Bf16 narrow(float a) { return Bf16{bf16_from_f32(a)}; }
};
template <> struct Number<F16> {
  typedef float Acc;
  PCIEIPC_FN static float widen(F16 e) { return f32_from_f16(e.bits); }
  PCIEIPC_FN static F16 narrow(float a) { return F16{f16_from_f32(a)}; }
};

// An element from its bits and back.
template <class E> PCIEIPC_FN E as(u64 b) { return (E)b; }
template <> PCIEIPC_FN Bf16 as<Bf16>(u64 b) { return Bf16{(u16)b}; }
template <> PCIEIPC_FN F16 as<F16>(u64 b) { return F16{(u16)b}; }
template <> PCIEIPC_FN float as<float>(u64 b) { return from_bits_f32((u32)b); }
template <> PCIEIPC_FN double as<double>(u64 b) { return from_bits_f64(b); }
PCIEIPC_FN u64 bits(Bf16 e) { return e.bits; }
PCIEIPC_FN u64 bits(F16 e) { return e.bits; }
PCIEIPC_FN u64 bits(float e) { return bits_f32(e); }
PCIEIPC_FN u64 bits(double e) { return bits_f64(e); }
PCIEIPC_FN u64 bits(signed char e) { return (u8)e; }
PCIEIPC_FN u64 bits(u8 e) { return e; }
PCIEIPC_FN u64 bits(short e) { return (u16)e; }
PCIEIPC_FN u64 bits(u16 e) { return e; }
PCIEIPC_FN u64 bits(int e) { return (u32)e; }
PCIEIPC_FN u64 bits(u32 e) { return e; }
PCIEIPC_FN u64 bits(long long e) { return (u64)e; }
PCIEIPC_FN u64 bits(u64 e) { return e; }

template <class A> struct Wrap { typedef A T; };  // integers wrap: computed unsigned
template <> struct Wrap<signed char> { typedef u8 T; };
template <> struct Wrap<short> { typedef u16 T; };
template <> struct Wrap<int> { typedef u32 T; };
template <> struct Wrap<long long> { typedef u64 T; };

// A NaN of either side is the result of a minimum or a maximum, and -0 is below +0.
PCIEIPC_FN bool negative(float x) { return bits_f32(x) >> 31; }
PCIEIPC_FN bool negative(double x) { return bits_f64(x) >> 63; }
template <class A> PCIEIPC_FN bool negative(A) { return false; }
template <class A> PCIEIPC_FN A lesser(A x, A y) { return (x != x) ? x : (y != y) ? y : (y < x || (x == y && negative(y))) ? y : x; }
template <class A> PCIEIPC_FN A greater(A x, A y) { return (x != x) ? x : (y != y) ? y : (x < y || (x == y && negative(x))) ? y : x; }

template <bool SIMPLE, class A> PCIEIPC_FN A apply(A x, A y, u32 op) {
  typedef typename Wrap<A>::T U;
  if (SIMPLE) return (A)((U)x + (U)y);
  switch (op) {
    case PRODUCT: return (A)((U)x * (U)y);
    case MINIMUM: return lesser(x, y);
    case MAXIMUM: return greater(x, y);
    default: return (A)((U)x + (U)y);
  }
}

// Accumulates W words of elements E. SIMPLE: the operation is a sum, known when the kernel is compiled.
template <class E, u32 W, bool SIMPLE> struct Accumulator {
  typedef typename Number<E>::Acc A;
  static constexpr u32 COUNT = W * 4 / sizeof(E);
  A v[COUNT];
  PCIEIPC_FN static A element(const u32* w, u32 i) {
    if (sizeof(E) == 8) return Number<E>::widen(as<E>((u64)w[2 * i % W] | (u64)w[(2 * i + 1) % W] << 32));
    return Number<E>::widen(as<E>((u64)(w[i * sizeof(E) / 4] >> (i * sizeof(E) % 4 * 8))));
  }
  PCIEIPC_FN void set(const u32* w) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) v[i] = element(w, i);
  }
  PCIEIPC_FN void add(const u32* w, u32 op) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) v[i] = apply<SIMPLE>(v[i], element(w, i), op);
  }
  PCIEIPC_FN void get(u32* w, u32 op, u32 ranks) {
    if (!SIMPLE && op == AVERAGE) {
#pragma unroll
      for (u32 i = 0; i < COUNT; i++) v[i] = v[i] / (A)ranks;
    }
#pragma unroll
    for (u32 i = 0; i < W; i++) w[i] = 0;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
      u64 b = bits(Number<E>::narrow(v[i]));
      if (sizeof(E) == 8) { w[2 * i % W] = (u32)b; w[(2 * i + 1) % W] = (u32)(b >> 32); }
      else w[i * sizeof(E) / 4] |= (u32)b << (i * sizeof(E) % 4 * 8);
    }
  }
};

// Two 16-bit floats in a word, added without a detour through f32 where the device can: the sum of two such floats, rounded to f32
// (24 bits) and again to 8 or 11 bits, is what one rounding gives, since 24 >= 2 * 11 + 2.
template <class E> struct Packed { static constexpr bool THERE = false; PCIEIPC_FN static u32 add(u32 x, u32) { return x; } };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <> struct Packed<Bf16> { static constexpr bool THERE = true; PCIEIPC_FN static u32 add(u32 x, u32 y) { return add_bf16x2(x, y); } };
template <> struct Packed<F16> { static constexpr bool THERE = true; PCIEIPC_FN static u32 add(u32 x, u32 y) { return add_f16x2(x, y); } };
#endif

// The result of two ranks, in rank order.
template <class E, u32 W, bool SIMPLE> PCIEIPC_FN void add_two(u32 rank, const u32* own, const u32* got, u32 op, u32* r) {
  if constexpr (SIMPLE && Packed<E>::THERE) {
#pragma unroll
    for (u32 i = 0; i < W; i++) r[i] = rank == 0 ? Packed<E>::add(own[i], got[i]) : Packed<E>::add(got[i], own[i]);
  } else {
    Accumulator<E, W, SIMPLE> acc;
    u32 first[W], second[W];
#pragma unroll
    for (u32 i = 0; i < W; i++) {
      first[i] = rank == 0 ? own[i] : got[i];
      second[i] = rank == 0 ? got[i] : own[i];
    }
    acc.set(first);
    acc.add(second, op);
    acc.get(r, op, 2);
  }
}

}  // namespace pcieipc
