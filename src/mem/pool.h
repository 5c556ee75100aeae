/* SPDX-License-Identifier: MIT */
#ifndef MEM_POOL_H
#define MEM_POOL_H
/*
 * The pool of staging memory. The process keeps pieces: equal blocks of huge-page memory,
 * registered once with the device they serve and then reused by job after job. What a job's lanes
 * need from the start is made as one slab: that takes half the time of making it piece by piece,
 * or less, and a registration holds up everybody's copies. What a lane does with its pieces:
 * staging.h.
 *
 * Invariants
 *   1. Pieces out in jobs never exceed the jobs' promises: a budget is asked before each piece.
 *   2. All pieces of a slab serve one device; it is unmapped when none of them is out.
 *   3. Jobs that gather ahead and all others have slabs of their own: what is plenty for the
 *      ones is never kept by the others.
 *   4. Pieces belong to one process: a forked child has none of them and starts a pool of its own.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "mem/device.h"

#define PIECE_SIZE ((size_t)4 << 20)

struct slab;

struct piece {
	unsigned char *memory;
	size_t size;
	struct slab *slab;		/* what it was made with */
	bool idle, touched;
	bool pinned;			/* by itself, where the slab was refused */
};

/* What a job may still take; shared by its lanes. */
struct piece_budget {
	atomic_int left;		/* pieces that may still be taken */
	atomic_int kept;		/* of `left`: PIECE_TOGETHER and PIECE_FIRST to come */
	int together;			/* of `kept`: PIECE_TOGETHER; under the pool's lock */
	_Atomic uint64_t bytes, peak_bytes;	/* pinned now, pieces and others, and most ever */
	_Atomic uint64_t made_bytes;	/* pieces that nobody had used before */
	size_t piece_size;
	bool gathers;			/* of a write that gathers ahead: its pieces are kept for
					   the next such job, however many they are */
};

/* Memory of another kind that counts against the promise: bytes more, or less. */
void budget_count(struct piece_budget *budget, int64_t bytes);

/* Which piece a lane asks for. The first two are kept for it, so that no lane is left without. */
enum piece_need {
	PIECE_TOGETHER,		/* of those that all lanes take at the start, made as one slab */
	PIECE_FIRST,		/* its first, by itself */
	PIECE_MORE,		/* a further one, while the budget has any to spare */
};

/* A piece within the budget, from the pool or new, touched; NULL with *rc 0 where the budget is
 * spent, NULL with a negative errno where memory is. */
struct piece *piece_take(struct piece_budget *budget, enum piece_need need,
			 struct pen_device *device, int *rc, struct pen_error *err);
/* Register it, and what was made with it, with the device it was taken for. -EAGAIN: another lane
 * is at it, or still touches what was made with it: the driver would bring in those pages one by
 * one, in everybody's way. Memory that the device refuses can be copied from as it is, only slower.
 * Lane's thread, after device_enter(). */
int piece_pin(struct piece *piece, struct pen_error *err);
/* Is it registered, so that the device can read it by itself? After piece_pin(). */
bool piece_pinned(const struct piece *piece);
void piece_put(struct piece_budget *budget, struct piece *piece);
/* Idle bytes that were left by jobs that gather ahead, for the next of them. */
uint64_t piece_kept(void);
/* Free what is idle and was made for `device`; NULL: for any. */
void piece_trim(struct pen_device *device);

#endif
