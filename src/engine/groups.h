/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_GROUPS_H
#define ENGINE_GROUPS_H
/*
 * Which groups of a job have come so far: landed, gathered or stored, one list for each stage. A
 * lane takes off a group's bytes as they arrive; who takes the last ones enters the group into
 * `order`, where the thread that asks finds it.
 *
 * Invariants
 *   1. Each group is entered once, by the lane that brought its last byte.
 *   2. Lanes never wait here: they take the lock only to wake somebody who said that he sleeps,
 *      and make a system call only for who asked for a descriptor.
 *   3. Where nobody asks (count is 0) nothing is allocated and a lane only looks at `count`.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include "engine/plan.h"

struct groups {
	uint64_t count;			/* 0: nobody asks */
	const struct plan *plan;
	_Atomic uint64_t *left;		/* bytes of each group that have not come yet */
	_Atomic uint64_t *order;	/* group + 1, in the order of completion; 0: not entered */
	_Atomic size_t entered;
	_Atomic uint64_t complete_ns;	/* when the last was entered; 0: not yet, or at the start */
	size_t told;			/* the asking thread's own */
	atomic_bool awaited;		/* somebody sleeps on `news` */
	pthread_mutex_t *lock;		/* the job's, both */
	pthread_cond_t *news;
	const atomic_int *eventfd;	/* the job's; -1: nobody polls */
};

/* Count what each group waits for; those that wait for nothing are complete. -ENOMEM. */
int groups_init(struct groups *groups, uint64_t count, const struct plan *plan,
		pthread_mutex_t *lock, pthread_cond_t *news, const atomic_int *eventfd);
void groups_fini(struct groups *groups);

/* All bytes of the plan's requests [first, first + count) have come. Lanes, in parallel. */
void groups_came(struct groups *groups, uint32_t first, uint32_t count);

/* What pen_job_landed() and its like do; `running` is what counts the lanes that still work. */
size_t groups_tell(struct groups *groups, atomic_uint *running, uint64_t *told, size_t room,
		   const struct timespec *until);

#endif
