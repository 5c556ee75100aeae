/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_LANE_H
#define ENGINE_LANE_H
/*
 * A lane is one thread with one queue and staging memory of its own. It takes requests from its
 * list, sends them through the queue, copies what landed and lets go.
 *
 *   lane.c      the thread: setting up, the loop, stepping down, bringing everything home
 *   take.c      which requests it carries next, and how many
 *   transit.c   what happens to one of them
 *   copies.c    between its buffer and memory
 *   forms.c     the same for bytes that are decoded, or that a GPU shall have in another form
 *   look.c      digesting bytes as they pass
 *
 * The life of a request on its way, with the function that walks each edge:
 *
 *   read    FREE --issue--> SENDABLE --send--> QUEUED --land--> COPYABLE --copy--> COPYING
 *                --home--> FREE
 *   write   FREE --issue--> COPYABLE --copy--> COPYING --gathered--> SENDABLE --send--> QUEUED
 *                --home--> FREE
 *   either  QUEUED --fell_short, or the next part of a write--> QUEUED, or SENDABLE where there is
 *           no room
 *           QUEUED --failed, fell_short--> WAITING --advance, when its time has come--> QUEUED
 *           QUEUED --failed, the path is barred--> SENDABLE with what a write gathered, by the next
 *           path; anything else FREE, its range held for that
 *           COPYING --copy_barred, no kernel reads what is lent--> FREE, its range held for the
 *           next path
 *           any --drain, when the job has failed or was cancelled--> FREE
 *
 * Copies of the host alone pass COPYING in one step; one that failed stays there, as its job fails.
 * Straight between the store and its memory a read goes from QUEUED home, and a write begins as
 * SENDABLE. What may be trusted in each state:
 *
 *   FREE       nothing
 *   SENDABLE   the buffer is the lane's; of a write it holds the bytes
 *   QUEUED     the buffer belongs to the kernel or to a library; `io` to the queue
 *   WAITING    the buffer is the lane's, and nothing is with the store
 *   COPYABLE   of a read the buffer holds all bytes; of a write the caller's memory does
 *   COPYING    the buffer belongs to the GPUs in `copying` until their fences have passed
 *
 * Invariants
 *   1. transits[i] belongs to staging.slots[i]; both are in use, or neither.
 *   2. A completion is failed, short or full, and all three are consumed in transit_came_home().
 *   3. What is in flight is never abandoned: the thread ends only when all of its requests and
 *      copies are over.
 *   4. What waits for its time holds up nobody: it has a slot, and no thread sleeps for it alone.
 *   5. A transit is in the list of its state, `to_send` or `moving`; FREE or QUEUED it is in none.
 *      It has a set of fences while it is COPYING, and there is always one to be had.
 */
#include <pthread.h>
#include "base/hist.h"
#include "engine/paths.h"
#include "engine/plan.h"
#include "mem/device.h"
#include "mem/staging.h"

/* Most requests of a lane with its queue at once, and most with the GPUs. */
#define LANE_DEPTH 64u
#define LANE_COPIES 64u

struct job_device;

/* Neighbours in the plan. */
struct range {
	uint32_t first, count;
};

enum transit_state { FREE, SENDABLE, QUEUED, WAITING, COPYABLE, COPYING };

struct transit {
	enum transit_state state;
	struct slot *slot;
	struct range range;
	uint64_t offset, end;		/* in the object: what the requests ask for */
	uint64_t start;			/* where I/O begins: a direct read is widened to blocks */
	uint64_t sent;			/* bytes from `start` on that the store is done with */
	uint64_t bytes;			/* of the object, that the user gets */
	uint64_t delivered;		/* and what they are in memory */
	uint64_t coded;			/* of its bytes, those that are decoded */
	uint32_t decoded;		/* COPYING: chunks that GPUs were told to decode */
	uint64_t edge_bytes;		/* of a direct write, those that went through the cache */
	unsigned char *buffer;		/* where `start` lies */
	bool straight;			/* the buffer is the user's memory */
	bool through;			/* the rest goes through the page cache */
	bool looked;			/* of a write: digested, if anybody asks */
	uint32_t devices;		/* GPUs that it copies to or from; a bit for each */
	uint32_t copying;		/* of these, whose fence has not passed */
	unsigned int fences;		/* COPYING: which of the lane's */
	struct transit *next, *before;	/* in the lane's list of its state */
	struct tally *tally;		/* of the path that sent it last */
	unsigned int retries;
	uint64_t due_ns;		/* WAITING: when it is sent again */
	uint64_t born_ns;
	struct queue_request io;	/* last: it is large, and cleared only in part */
};

/* Transits one after the other, the oldest first. */
struct transit_list {
	struct transit *first, *last;
};

struct lane {
	struct pen_job *job;
	const struct path *planned;
	unsigned int index, peers;	/* among the lanes of the same path */
	unsigned int stream;		/* of each device, that it queues on */
	pthread_t thread;
	bool started;

	/* All below belongs to the lane's thread until it has ended, except the counters. */
	struct path path;		/* the one it uses now; not as planned after a step down */
	struct queue queue;
	bool queue_up;
	struct staging staging;
	struct transit *transits;	/* one per slot */
	struct transit_list to_send;	/* those that are SENDABLE */
	struct transit_list moving;	/* COPYABLE, COPYING and WAITING ones */
	struct device_fence (*fences)[PLAN_DEVICES];	/* LANE_COPIES of them ... */
	uint64_t fences_taken;		/* ... and a bit for each that a transit has */
	bool full;			/* there was no room for the last that was taken */
	uint32_t devices_up;		/* a bit for each of the plan's */
	int entered;			/* the device that is current for this thread; -1: none */
	unsigned int pinned_pieces;
	void *part;			/* where forms.c converts, if it ever has to; or NULL */
	unsigned int sendable, waiting;	/* transits in these states */
	unsigned int copying;		/* and those that are COPYABLE or COPYING */
	struct range *held;		/* taken from the list, waiting for room or another path */
	unsigned int held_count;
	uint64_t waited_ns, last_wait_ns;	/* for copies: this time so far, and last time */
	bool leaving;			/* its path is barred; it goes once nothing is under way */
	struct pen_error why_leaving;
	struct tally *tally, *edge_tally;
	struct hist latency;
	uint64_t requests, retries, storage_bytes, cpu_ns;
	uint64_t digested_bytes, unverified_bytes, delivered_bytes;
	uint64_t coded_bytes;		/* decoded, by whomever ... */
	uint64_t core_decoded_bytes, decode_ns;	/* ... by the lane, and how long it took for it */
	_Atomic uint64_t bytes;		/* read by pen_job_poll */
};

/* -ENOMEM, or 0; and what is left of it after its thread has ended, or if that never began. */
int lane_init(struct lane *lane, struct pen_job *job, const struct path *path, unsigned int index);
void lane_fini(struct lane *lane);
/* The thread. */
void *lane_run(void *lane);

/* ---- lane.c, for transit.c ---- */
bool lane_writes(const struct lane *lane);
void lane_fail(struct lane *lane, const struct pen_error *err);
/* One more piece of staging; -EAGAIN: not now. */
int lane_add_piece(struct lane *lane, enum piece_need need);
/* True once all of these devices can take copies from staging memory. */
bool lane_devices_usable(struct lane *lane, uint32_t devices);
/* The stream that it queues on. */
struct device_stream *lane_stream(struct lane *lane, unsigned int device);
/* Make a device current. */
int lane_enter(struct lane *lane, unsigned int device, struct pen_error *err);

/* ---- take.c ---- */

/* How much may be asked for in one request now, and how many may be with the store. */
uint64_t take_size(struct lane *lane);
unsigned int take_depth(struct lane *lane);
/* May one more be issued? */
bool take_allowed(struct lane *lane);
/* The next range to carry, up to `limit` bytes; false: there is none. */
bool take_next(struct lane *lane, uint64_t limit, struct range *range);
/* What was taken and could not be sent: it goes first when there is room, or another path. */
void take_hold(struct lane *lane, struct range range);
bool take_work_left(struct lane *lane);
/* Can this request go straight between the store and its memory? */
bool take_straight(const struct lane *lane, uint32_t request);
/* Bytes that the requests from `first` to `last` take in a buffer: as direct I/O wants them. */
uint64_t take_span(const struct lane *lane, uint32_t first, uint32_t last);

/* ---- transit.c ---- */

/* Take one more range and send it on its way; false where there is none, or no room. */
bool transit_issue(struct lane *lane);
/* A request is back from the queue. */
void transit_came_home(struct lane *lane, struct transit *transit);
/* Move every transit on by what is possible now. Returns whether anything moved. */
bool transit_advance(struct lane *lane);
/* Give up what a transit holds; the kernel and the GPUs have let go of it. */
void transit_let_go(struct lane *lane, struct transit *transit);
/* When the first that waits is due; UINT64_MAX: none waits. */
uint64_t transit_next_due(const struct lane *lane);

/* ---- copies.c ---- */

/* Queue the copies of a transit, and a fence behind them on each GPU. */
int copies_queue(struct lane *lane, struct transit *transit, struct pen_error *err);
/* The fences have passed: was everything decoded to what it was? */
int copies_check(struct lane *lane, const struct transit *transit, struct pen_error *err);

/* ---- forms.c ---- */

/* Queue one copy of a transit to a GPU, with a form. */
int forms_queue(struct lane *lane, const struct transit *transit, unsigned int device,
		const struct device_copy *copy, struct pen_error *err);
/* Decode a part of what is in the buffer to any device. */
int forms_decode(struct lane *lane, struct transit *transit, unsigned int device,
		 const struct coding_part *part, struct pen_error *err);

/* ---- look.c ---- */

/* Digest the chunks of a transit whose bytes are in its buffer. */
void look(struct lane *lane, const struct transit *transit);
/* Its bytes were moved and nobody saw them. */
void look_unseen(struct lane *lane, const struct transit *transit);

#endif
