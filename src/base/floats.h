/* SPDX-License-Identifier: MIT */
#ifndef BASE_FLOATS_H
#define BASE_FLOATS_H
/*
 * One number from one floating dtype to another, as its bits: compiled for cores by form.c and for
 * GPUs by kernels/convert.cu, so that both give the same bits. They are torch's: to the nearest,
 * ties to even; too large is infinite; subnormal numbers stay. A NaN stays one, and which it is
 * means nothing.
 *
 * There is no branch, so that compilers make vectors of it, and no arithmetic on subnormal floats,
 * which a thread may have been told to take for zero. It includes nothing: GPU compilers have no
 * headers of C.
 */
#ifdef __CUDACC__
#define FLOATS_FUNCTION static __device__ __forceinline__
#else
#define FLOATS_FUNCTION static inline
#endif

typedef unsigned short floats_half;	/* the bits of bf16 or fp16 */
typedef unsigned int floats_single;	/* the bits of fp32 */

#define FLOATS_SIGN 0x80000000u
#define FLOATS_INFINITE 0x7f800000u
#define FLOATS_REBIAS (112u << 23)	/* what the exponents of fp32 and fp16 differ by */

FLOATS_FUNCTION float floats_value(floats_single bits)
{
	union {
		floats_single bits;
		float value;
	} both = { bits };

	return both.value;
}

FLOATS_FUNCTION floats_single floats_bits(float value)
{
	union {
		float value;
		floats_single bits;
	} both = { value };

	return both.bits;
}

/* Written such that no compiler makes a branch of it. */
FLOATS_FUNCTION floats_single floats_choose(int condition, floats_single yes, floats_single no)
{
	floats_single mask = 0u - (floats_single)condition;

	return (yes & mask) | (no & ~mask);
}

FLOATS_FUNCTION floats_single floats_bf16_to_f32(floats_half number)
{
	return (floats_single)number << 16;
}

FLOATS_FUNCTION floats_half floats_f32_to_bf16(floats_single number)
{
	floats_single nearest = (number + 0x7fffu + (number >> 16 & 1)) >> 16;
	floats_single nan = (number >> 16 & 0x8000u) | 0x7fc0u;

	return (floats_half)floats_choose((number & ~FLOATS_SIGN) > FLOATS_INFINITE, nan, nearest);
}

FLOATS_FUNCTION floats_single floats_f16_to_f32(floats_half number)
{
	floats_single sign = (floats_single)(number & 0x8000u) << 16;
	floats_single size = (floats_single)(number & 0x7fffu) << 13;
	floats_single usual = size + FLOATS_REBIAS;
	/* A subnormal one is a fraction of 2^-14 without the one before it: add and subtract it. */
	floats_single small = floats_bits(floats_value(usual + (1u << 23)) -
					  floats_value(FLOATS_REBIAS + (1u << 23)));

	usual += floats_choose(size >= (31u << 23), FLOATS_REBIAS, 0);
	return sign | floats_choose(size < (1u << 23), small, usual);
}

FLOATS_FUNCTION floats_half floats_f32_to_f16(floats_single number)
{
	floats_single sign = number >> 16 & 0x8000u;
	floats_single size = number & ~FLOATS_SIGN;
	floats_single usual = (size - FLOATS_REBIAS + 0xfffu + (size >> 13 & 1)) >> 13;
	/* The last bit of 0.5 is the last of a subnormal fp16: adding it rounds there. */
	floats_single small = floats_bits(floats_value(size) + 0.5f) - floats_bits(0.5f);
	floats_single large = floats_choose(size > FLOATS_INFINITE, 0x7e00u, 0x7c00u);

	/* 65520 and what is above it are nearest to 2^16. */
	usual = floats_choose(size < 0x477ff000u, usual, large);
	return (floats_half)(sign | floats_choose(size < (113u << 23), small, usual));
}

FLOATS_FUNCTION floats_half floats_bf16_to_f16(floats_half number)
{
	return floats_f32_to_f16(floats_bf16_to_f32(number));
}

FLOATS_FUNCTION floats_half floats_f16_to_bf16(floats_half number)
{
	return floats_f32_to_bf16(floats_f16_to_f32(number));
}

#endif
