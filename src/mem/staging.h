/* SPDX-License-Identifier: MIT */
#ifndef MEM_STAGING_H
#define MEM_STAGING_H
/*
 * What one lane stages in: a few pieces of the pool, cut into slots as requests need them. A slot
 * is the lowest free stretch that fits, so light use stays in a few hot megabytes, and it never
 * crosses a piece, so it never straddles two registrations.
 *
 * Who uses it meanwhile, the kernel or a GPU, is the transit's to know (engine/lane.h).
 *
 * Invariants
 *   1. A slot is put back only when the kernel and every GPU have let go of it.
 *   2. Slots that are out do not overlap; each begins at a page, as direct I/O wants it.
 *   3. The bits of `busy` are those of the slots that are out.
 */
#include "mem/pool.h"

struct slot {
	bool taken;
	unsigned char *memory;		/* NULL: it needs none (straight to memory, or lent) */
	unsigned int piece;		/* index in the staging */
	size_t at, size;		/* place in the piece */
	struct slot *next;		/* in the same piece, by place */
};

/* Slots of one lane, unless it shall gather far ahead. */
#define STAGING_SLOTS 64u

struct staging {
	struct staged_piece {
		struct piece *piece;
		struct slot *first;
		size_t free;		/* bytes, in whatever stretches */
		size_t unused;		/* where no slot has been, from here to the end */
	} *pieces;
	unsigned int piece_count, piece_room;
	struct slot *slots;
	unsigned int slot_count;
	unsigned int used;		/* slots that are out */
	uint64_t *busy;			/* a bit for each slot */
};

/* -ENOMEM, or 0. fini() wants no slot in use and no piece left. */
int staging_init(struct staging *staging, unsigned int slots, unsigned int pieces);
void staging_fini(struct staging *staging);

/* A slot of `size` bytes (0: only the bookkeeping); NULL where there is no room now. */
struct slot *staging_take(struct staging *staging, size_t size);
/* The same in the piece that was added last, and there only where no slot has been yet. */
struct slot *staging_take_unused(struct staging *staging, size_t size);
void staging_put(struct staging *staging, struct slot *slot);

/* The number of the first slot in use from `from` on; slot_count: there is none. */
unsigned int staging_next(const struct staging *staging, unsigned int from);

/* One more piece gives room at once, for what fits into a piece. And the last one back. */
bool staging_can_grow(const struct staging *staging);
void staging_add(struct staging *staging, struct piece *piece);
struct piece *staging_remove(struct staging *staging);

#endif
