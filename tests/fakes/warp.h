/* SPDX-License-Identifier: MIT */
#ifndef TESTS_WARP_H
#define TESTS_WARP_H
/*
 * As much of CUDA as src/kernels/decode.cu uses, for a core: the 32 lanes of a block are contexts
 * of one thread, which takes turns where lanes wait for each other. So the very source of the
 * kernel is compared with its twin where there is no GPU. (Whether the GPU's compiler makes the
 * same of it, tests/gpu/test_decode.c sees on one.)
 */
#include <algorithm>
#include <cstring>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static

using std::min;

struct uint4 {
	unsigned int x, y, z, w;
};

static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w)
{
	return uint4{ x, y, z, w };
}

struct place {
	unsigned int x;
};

static place threadIdx, blockIdx;

/* ----------------------------------------------------------------------------- the lanes -- */

static ucontext_t lanes[32], home;
static unsigned int exchanged[2][32];	/* what each lane says; two, since some run ahead */
static unsigned int turns[32];		/* how often each has waited */
static void (*entered)(const void *);
static const void *argument;

static unsigned int wait_for_all()
{
	unsigned int own = threadIdx.x, turn = turns[own]++;

	threadIdx.x = (own + 1) % 32;
	swapcontext(&lanes[own], &lanes[threadIdx.x]);
	return turn % 2;
}

static void run_lane()
{
	entered(argument);
	/* All lanes wait equally often, so the next one has its last turn, or there is none. */
	if (threadIdx.x == 31)
		setcontext(&home);
	threadIdx.x++;
	setcontext(&lanes[threadIdx.x]);
}

static void run_block(void (*function)(const void *), const void *given, unsigned int block)
{
	static char stacks[32][1 << 16];

	entered = function;
	argument = given;
	blockIdx.x = block;
	threadIdx.x = 0;
	for (int i = 0; i < 32; i++) {
		getcontext(&lanes[i]);
		lanes[i].uc_stack.ss_sp = stacks[i];
		lanes[i].uc_stack.ss_size = sizeof(stacks[i]);
		makecontext(&lanes[i], run_lane, 0);
		turns[i] = 0;
	}
	swapcontext(&home, &lanes[0]);
}

static inline void __syncwarp()
{
	wait_for_all();
}

static inline unsigned int say(unsigned int value, unsigned int *turn)
{
	exchanged[turns[threadIdx.x] % 2][threadIdx.x] = value;
	*turn = wait_for_all();
	return threadIdx.x;
}

static inline unsigned int __shfl_sync(unsigned int, unsigned int value, int lane)
{
	unsigned int turn;

	say(value, &turn);
	return exchanged[turn][lane];
}

static inline unsigned int __shfl_up_sync(unsigned int, unsigned int value, int distance)
{
	unsigned int turn, own = say(value, &turn);

	return exchanged[turn][(int)own >= distance ? own - distance : own];
}

static inline unsigned int __shfl_xor_sync(unsigned int, unsigned int value, int mask)
{
	unsigned int turn, own = say(value, &turn);

	return exchanged[turn][own ^ mask];
}

static inline int __any_sync(unsigned int, unsigned int value)
{
	unsigned int turn, any = 0;

	say(value, &turn);
	for (int i = 0; i < 32; i++)
		any |= exchanged[turn][i];
	return any != 0;
}

static inline int __all_sync(unsigned int mask, unsigned int value)
{
	return !__any_sync(mask, !value);
}

/* -------------------------------------------------------------------------- instructions -- */

static inline int __popc(unsigned int bits)
{
	return __builtin_popcount(bits);
}

static inline int __popcll(unsigned long long bits)
{
	return __builtin_popcountll(bits);
}

static inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift)
{
	return (unsigned int)(((unsigned long long)high << 32 | low) >> (shift & 31));
}

static inline unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector)
{
	unsigned long long both = (unsigned long long)high << 32 | low;
	unsigned int result = 0;

	for (int i = 0; i < 4; i++)
		result |= (unsigned int)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
	return result;
}

#endif
