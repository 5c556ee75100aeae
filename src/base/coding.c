/* SPDX-License-Identifier: MIT */
/* Chunks and boxes of a coding, and the twin of the kernels that decode; see coding.h. */
#include <string.h>
#include "base/coding.h"

#define KERNEL(kind, name) { "decode_" #name, PLANES_##kind, PEN_FORM_PLAIN }
#define KERNEL_TO(kind, form, name) { "decode_" #name, PLANES_##kind, PEN_FORM_##form }

const struct coding_kernel coding_kernels[] = {
	KERNEL(BF16, bf16),
	KERNEL_TO(BF16, BF16_TO_F16, bf16_to_f16),
	KERNEL_TO(BF16, BF16_TO_F32, bf16_to_f32),
	KERNEL(F16, f16),
	KERNEL_TO(F16, F16_TO_BF16, f16_to_bf16),
	KERNEL_TO(F16, F16_TO_F32, f16_to_f32),
	KERNEL(F32, f32),
	KERNEL_TO(F32, F32_TO_BF16, f32_to_bf16),
	KERNEL_TO(F32, F32_TO_F16, f32_to_f16),
	KERNEL(E4M3, e4m3),
	KERNEL(E5M2, e5m2),
};

unsigned int coding_kernel(const struct coding *coding)
{
	uint64_t form = coding->form ? form_number(coding->form) : PEN_FORM_PLAIN;
	unsigned int i = 0;

	while (coding_kernels[i].kind != coding->kind || coding_kernels[i].form != form)
		i++;
	return i;
}

static uint64_t chunk_count(const struct coding *coding)
{
	return (coding->values + PLANES_CHUNK - 1) / PLANES_CHUNK;
}

uint64_t coding_value_size(const struct coding *coding)
{
	return coding->form ? coding->form->to_size : planes_shapes[coding->kind].bytes;
}

uint64_t coding_chunk_at(const struct coding *coding, uint64_t offset)
{
	uint64_t low = 0, high = chunk_count(coding);

	while (high - low > 1) {
		uint64_t middle = low + (high - low) / 2;

		if (coding->offsets[middle] <= offset)
			low = middle;
		else
			high = middle;
	}
	return low;
}

uint64_t coding_chunk_end(const struct coding *coding, uint64_t chunk)
{
	return coding->offsets[chunk] + coding->chunks[chunk].bytes;
}

/* How many values of the box lie before value `end` of the tensor. */
static uint64_t in_box_before(const struct coding *coding, uint64_t end)
{
	uint64_t from_start, row, left;

	if (end <= coding->start)
		return 0;
	from_start = end - coding->start;
	row = coding->rows > 1 ? from_start / coding->pitch : 0;
	if (row >= coding->rows)
		return coding->rows * coding->length;
	left = from_start - row * coding->pitch;
	return row * coding->length + (left < coding->length ? left : coding->length);
}

uint64_t coding_bytes(const struct coding *coding, uint64_t first, uint64_t end)
{
	return (in_box_before(coding, end * PLANES_CHUNK) -
		in_box_before(coding, first * PLANES_CHUNK)) * coding_value_size(coding);
}

uint64_t coding_span(const struct coding *coding)
{
	return (coding->rows - 1) * coding->memory_pitch +
	       coding->length * coding_value_size(coding);
}

uint32_t coding_launch(const struct coding_part *part, uint64_t done, struct decode_launch *launch)
{
	const struct coding *coding = part->coding;
	uint64_t first = part->first + done, left = part->count - done;
	uint32_t count = left < DECODE_CHUNKS ? (uint32_t)left : DECODE_CHUNKS;
	uint64_t begin = first * PLANES_CHUNK, end = begin + (uint64_t)count * PLANES_CHUNK;

	launch->to = part->memory;
	launch->from = part->stored + (coding->offsets[first] - coding->offsets[part->first]);
	launch->count = count;
	launch->values = (uint32_t)((end < coding->values ? end : coding->values) - begin);
	launch->unused = 0;
	launch->first = (long long)(begin - coding->start);
	launch->length = (long long)coding->length;
	launch->rows = (long long)coding->rows;
	launch->pitch = (long long)coding->pitch;
	launch->memory_pitch = (long long)coding->memory_pitch;
	for (uint32_t i = 0; i < count; i++) {
		const struct planes_chunk *chunk = &coding->chunks[first + i];

		launch->chunks[i] = (struct decode_chunk){
			.at = (uint32_t)(coding->offsets[first + i] - coding->offsets[first]),
			.checksum = chunk->checksum,
			.escapes = { chunk->escapes[0], chunk->escapes[1], chunk->escapes[2] },
			.coded = chunk->coded,
		};
	}
	return count;
}

/* ---------------------------------------------------------------------------------- the twin -- */

static void put(unsigned char *to, const unsigned char *from, uint64_t bytes,
		const struct form *form)
{
	if (form)
		form->apply(to, from, bytes / form->from_size);
	else
		memcpy(to, from, bytes);
}

/* What the box has of `count` values, the first of which has the number `first`. */
static void deliver(const struct decode_launch *launch, long long first, long long count,
		    const unsigned char *values, unsigned int size, const struct form *form)
{
	long long row = launch->rows > 1 && first > 0 ? first / launch->pitch : 0;
	unsigned int to_size = form ? form->to_size : size;

	for (; row < launch->rows; row++) {
		long long begin = row * launch->pitch, end = begin + launch->length;
		long long low = begin > first ? begin : first;
		long long high = end < first + count ? end : first + count;

		if (begin >= first + count)
			break;
		if (low < high)
			put(launch->to + row * launch->memory_pitch + (low - begin) * to_size,
			    values + (low - first) * size, (uint64_t)(high - low) * size, form);
	}
}

void decode_run(const struct decode_launch *launch, enum planes_kind kind, const struct form *form)
{
	_Alignas(16) unsigned char room[PLANES_ROOM];
	unsigned int size = planes_shapes[kind].bytes;

	for (uint32_t i = 0; i < launch->count; i++) {
		const struct decode_chunk *known = &launch->chunks[i];
		struct planes_chunk chunk = { .checksum = known->checksum, .coded = known->coded };
		uint32_t left = launch->values - i * PLANES_CHUNK;
		uint32_t count = left < PLANES_CHUNK ? left : PLANES_CHUNK;
		long long first = launch->first + (long long)i * PLANES_CHUNK;
		/* Where all of it goes to one place as it is, it is decoded there. */
		bool straight = !form && launch->rows == 1 && first >= 0 &&
				first + count <= launch->length;
		unsigned char *values = straight ? launch->to + first * size : room;

		memcpy(chunk.escapes, known->escapes, sizeof(chunk.escapes));
		if (!planes_decode(kind, launch->from + known->at, &chunk, count, values))
			*launch->verdict = launch->mark + i + 1;
		if (!straight)
			deliver(launch, first, count, room, size, form);
	}
}
