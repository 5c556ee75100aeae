/* SPDX-License-Identifier: MIT */
/*
 * Kernels that change the dtype of numbers on their way to the GPU's memory. They read the staging
 * memory of the host themselves, over the bus, and write the result to its final place, so nothing
 * is staged on the device. Their twins for cores are in base/form.c; both are made of
 * base/floats.h.
 *
 * The bus wants whole lines of 128 bytes, and many of them on their way at once. So the 32 threads
 * of a warp read the 32 words of a line, from the line on in which the numbers begin, and each
 * thread asks for STEPS words before it looks at the first.
 *
 * `values` numbers in each of `rows` rows; pitches are in bytes. Addresses and pitches are
 * multiples of the size of a number. Whoever starts them chooses the grid: x shares out a row, y
 * the rows. No row, and no grid of x, may have more than 2^28 numbers, so 32 bits count them.
 */
#include "base/floats.h"

typedef unsigned long long u64;

#define LINE 128
#define STEPS 8

/* A word of the host's memory as numbers of one dtype. */
template <typename From> union word {
	unsigned int bits;
	From numbers[sizeof(unsigned int) / sizeof(From)];
};

template <typename From, typename To, To change(From)>
static __device__ __forceinline__ void convert_row(To *to, const From *from, int values)
{
	constexpr int count = sizeof(unsigned int) / sizeof(From);
	const u64 begin = reinterpret_cast<u64>(from) / LINE * LINE;
	const int before = (int)((reinterpret_cast<u64>(from) - begin) / sizeof(From));
	const word<From> *words = reinterpret_cast<const word<From> *>(begin);
	const int step = (int)blockDim.x, stride = step * STEPS * (int)gridDim.x;

	/* Numbers are counted from the first that is wanted; those before it are below 0. */
	for (int at = (int)blockIdx.x * step * STEPS + (int)threadIdx.x;
	     at * count - before < values; at += stride) {
		word<From> got[STEPS];

#pragma unroll
		for (int i = 0; i < STEPS; i++) {
			int first = (at + i * step) * count - before;

			if (first > -count && first < values)
				got[i] = words[at + i * step];
		}
#pragma unroll
		for (int i = 0; i < STEPS; i++)
#pragma unroll
			for (int k = 0; k < count; k++) {
				int number = (at + i * step) * count - before + k;

				if (number >= 0 && number < values)
					to[number] = change(got[i].numbers[k]);
			}
	}
}

#define CONVERT(name, From, To) \
	extern "C" __global__ void convert_##name(char *to, const char *from, int values, \
						  u64 rows, u64 to_pitch, u64 from_pitch) \
	{ \
		for (u64 row = blockIdx.y; row < rows; row += gridDim.y) \
			convert_row<From, To, floats_##name>( \
				reinterpret_cast<To *>(to + row * to_pitch), \
				reinterpret_cast<const From *>(from + row * from_pitch), values); \
	}

CONVERT(bf16_to_f16, floats_half, floats_half)
CONVERT(bf16_to_f32, floats_half, floats_single)
CONVERT(f16_to_bf16, floats_half, floats_half)
CONVERT(f16_to_f32, floats_half, floats_single)
CONVERT(f32_to_bf16, floats_single, floats_half)
CONVERT(f32_to_f16, floats_single, floats_half)
