/* SPDX-License-Identifier: MIT */
/*
 * The kernels of src/kernels/decode.cu, run by a core (warp.h), and their twin side by side: the
 * same bytes in memory, the same verdict, over numbers of every kind, lengths, boxes and damage.
 */
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "warp.h"
#include "kernels/decode.cu"

extern "C" {
#define restrict
#define _Alignas(n) alignas(n)
#define _Static_assert static_assert
#include "base/coding.h"
}

typedef void (*entry)(const decode_launch);

static const entry entries[CODING_KERNELS] = {
	decode_bf16, decode_bf16_to_f16, decode_bf16_to_f32, decode_f16, decode_f16_to_bf16,
	decode_f16_to_f32, decode_f32, decode_f32_to_bf16, decode_f32_to_f16, decode_e4m3,
	decode_e5m2,
};

static entry running;

static void run(const void *launch)
{
	running(*(const decode_launch *)launch);
}

static unsigned long long seed = 1;

static unsigned int chance()
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (unsigned int)(seed >> 32);
}

/* How values are made: as weights are, of few symbols, of many, all alike, or any bits. */
enum { WEIGHTS, FEW, ESCAPES, ALIKE, RANDOM, MAKES };

static unsigned int make(enum planes_kind kind, int how)
{
	const struct planes_shape *shape = &planes_shapes[kind];
	unsigned int rest = chance(), symbol = 0, most = (1u << shape->symbol) - 1;

	switch (how) {
	case WEIGHTS:
		symbol = most * 3 / 4 - std::min(__builtin_clz(chance() | 1), (int)most / 2);
		break;
	case FEW:
		symbol = chance() % 3;
		break;
	case ESCAPES:
		symbol = chance() % 8 < 5 ? 0 : chance();
		break;
	case ALIKE:
		return 0;
	default:
		return rest;
	}
	return (rest & ~(most << shape->mantissa)) | (symbol & most) << shape->mantissa;
}

struct box {
	uint64_t start, length, rows, pitch, gap;
};

static void fail(const struct coding_kernel &kernel, uint32_t values, int how, const char *what)
{
	std::fprintf(stderr, "%s: %u values made in way %d: %s\n", kernel.name, values, how, what);
	std::exit(1);
}

static void compare(unsigned int number, uint32_t values, int how, bool damaged, struct box box)
{
	const struct coding_kernel &kernel = coding_kernels[number];
	const struct form *form = form_of(kernel.form);
	unsigned int size = planes_shapes[kernel.kind].bytes, to_size = form ? form->to_size : size;
	uint32_t chunks = (values + PLANES_CHUNK - 1) / PLANES_CHUNK;
	std::vector<unsigned char> plain(values * size + 4);
	std::vector<uint4> stored(chunks * PLANES_ROOM / 16);
	std::vector<struct planes_chunk> table(chunks);
	std::vector<uint64_t> offsets(chunks);
	struct coding coding = {};
	struct coding_part part = {};
	unsigned int verdicts[2] = { 0, 0 };
	uint64_t at = 0;

	for (uint32_t i = 0; i < values; i++) {
		unsigned int value = make(kernel.kind, how);

		std::memcpy(plain.data() + i * size, &value, size);
	}
	for (uint32_t i = 0; i < chunks; i++) {
		uint32_t count = std::min(values - i * PLANES_CHUNK, PLANES_CHUNK);

		offsets[i] = at;
		planes_encode(kernel.kind, plain.data() + i * PLANES_CHUNK * size, count,
			      (char *)stored.data() + at, &table[i]);
		if (!planes_check(kernel.kind, count, &table[i]))
			fail(kernel, values, how, "a chunk of our own is refused");
		at += table[i].bytes;
	}
	if (damaged)
		for (uint64_t i = 0; i < at; i += 1 + chance() % 3)
			((unsigned char *)stored.data())[i] |= (unsigned char)chance();
	coding.kind = kernel.kind;
	coding.form = form;
	coding.chunks = table.data();
	coding.offsets = offsets.data();
	coding.values = values;
	coding.start = box.start;
	coding.length = box.length;
	coding.rows = box.rows;
	coding.pitch = box.pitch;
	coding.memory_pitch = (box.length + box.gap) * to_size;
	part.coding = &coding;
	part.count = chunks;
	part.stored = (const unsigned char *)stored.data();

	std::vector<uint4> memories[2];
	for (int which = 0; which < 2; which++) {
		decode_launch launch;

		memories[which].resize(coding_span(&coding) / 16 + 4);
		std::memset(memories[which].data(), 0xee, memories[which].size() * 16);
		/* One value from where stores of 16 bytes could be. */
		part.memory = (unsigned char *)(memories[which].data() + 1) +
			      (box.gap == 1 ? to_size : 0);
		coding_launch(&part, 0, &launch);
		launch.verdict = &verdicts[which];
		launch.mark = 7;
		if (which) {
			decode_run(&launch, kernel.kind, form);
		} else {
			running = entries[number];
			for (unsigned int i = 0; i < launch.count; i++)
				run_block(run, &launch, i);
		}
	}
	if (!verdicts[0] != !verdicts[1] || !verdicts[0] == damaged)
		fail(kernel, values, how, "the verdict");
	if (verdicts[0] > 7 + chunks)
		fail(kernel, values, how, "a chunk that there is not");
	if (!damaged && std::memcmp(memories[0].data(), memories[1].data(),
				    memories[0].size() * 16))
		fail(kernel, values, how, "the values");
}

int main()
{
	static const uint32_t lengths[] = { 1, 2, 3, 15, 17, 511, 513, 2047, 2050, 16383, 16385,
					    3 * 16384 - 1 };
	unsigned int cells = 0;

	for (unsigned int number = 0; number < CODING_KERNELS; number++)
		for (int how = 0; how < MAKES; how++) {
			for (uint32_t values : lengths)
				compare(number, values, how, false, { 0, values, 1, values, 0 });
			compare(number, 16385, how, false, { 3, 16000, 1, 16000, 1 });
			compare(number, 40000, how, false, { 16390, 20000, 1, 20000, 0 });
			compare(number, 40000, how, false, { 100, 70, 300, 123, 1 });
			compare(number, 40000, how, false, { 5, 64, 9, 4096, 0 });
			compare(number, 40000, how, false, { 39999, 1, 1, 1, 0 });
			compare(number, 40000, how, false, { 0, 1, 400, 100, 3 });
			/* Columns as a rank has them: few lanes of a step, or parts of lanes. */
			compare(number, 40000, how, false, { 2048, 2048, 4, 8192, 0 });
			compare(number, 40000, how, false, { 64, 48, 100, 256, 16 });
			compare(number, 40000, how, false, { 16, 1000, 19, 1999, 0 });
			compare(number, 40000, how, false, { 700, 100, 30, 520, 12 });
			compare(number, 20000, how, true, { 0, 20000, 1, 20000, 0 });
			cells += 23;
		}
	std::printf("%u cells\n", cells);
	return 0;
}
