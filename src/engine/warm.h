/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_WARM_H
#define ENGINE_WARM_H
/*
 * Warming: what a job read around the page cache is brought into it afterwards, by one thread for
 * all jobs of the process, which comes with the first file and goes with the last.
 *
 *   warm_begin --> [ wait for a quiet disk --> read a burst ] --> all read, or given up
 *
 * It is in nobody's way:
 *   - It reads in bursts of some MiB, and looks at the disk's statistics before each and within.
 *     Whatever is not its own is somebody else's, who wants the disk: then it waits until that is
 *     over, longer each time. A job of this process is somebody else, too.
 *   - It ends when memory gets short: what it has yet to read must fit into what is available, or
 *     into half of that where nobody asked for it.
 *   - It holds files open, but looks before each burst, and while it waits, whether one has lost
 *     its name or was written to, and lets go of it then.
 *
 * Invariants
 *   1. Only the thread takes files off the list; others add to its end, or mark them `dropped`.
 *   2. What is being read of a file is the thread's; the rest of it, and all of struct warm, is
 *      guarded by the lock. Nothing is read with the lock held.
 *   3. A forked child has none of it: neither thread nor files.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include "engine/schedule.h"
#include "penstock.h"

struct warm_file;

struct warm {
	const char *root;	/* what /proc and /sys are found under: "", or a test's folder */
	pthread_mutex_t lock;
	pthread_cond_t news;	/* a file was dropped, or has left the list */
	struct warm_file *first;	/* what the thread is at, and what comes after */
	bool running;		/* there is a thread */
	uint64_t left, brought, given_up;	/* as in struct pen_warming, as is reason */
	char reason[PEN_REASON_MAX];
};

/* The one of the process. */
extern struct warm warm_process;

void warm_init(struct warm *warm, const char *root);

/*
 * Begin with what a schedule had to read around the page cache, after it was carried out. `bytes`
 * is how much that is; where it is 0, because it is not to be done, `reason` says why not.
 */
void warm_begin(struct warm *warm, const struct schedule *schedule, bool unasked, uint64_t *bytes,
		char reason[PEN_REASON_MAX]);

/* Let go of a file, now: when it returns nobody reads it any more. */
void warm_drop(struct warm *warm, const struct pen_object *object);

int warm_wait(struct warm *warm, double seconds);
void warm_stop(struct warm *warm);

#endif
