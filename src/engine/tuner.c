/* SPDX-License-Identifier: MIT */
/* Finding the knee of a store at run time; see tuner.h. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "engine/tuner.h"
#include "sys/os.h"

/* Where an unknown store starts: the knee of common disks. Reads of 512 KiB were up to a tenth
 * faster than the same bytes in flight as reads of 1 MiB; writes are merged on the way. */
#define START_READ ((struct tuner_setting){ 512u << 10, 16 })
#define START_WRITE ((struct tuner_setting){ 1u << 20, 8 })
#define SIZE_MIN (512u << 10)
/* A window must hold enough to average over: bytes, round trips, and time. */
#define WINDOW_BYTES (64ull << 20)
#define WINDOW_ROUNDS 6
#define WINDOW_NS 8000000ull
/* A move must pay this much; less is noise. One that pays much more needs to do it only once. */
#define GAIN 1.07
#define GAIN_CLEAR 1.25
/* When no neighbour pays, sit still this many windows before looking again. */
#define REST 64
/* A store that is this fast (bytes a nanosecond) at the start is not far from its knee: there
 * a job would pay for looking around, a few per cent, and have nothing of it. After a while it is
 * asked once whether it would take much more in flight, and then left alone for long. */
#define NEAR 1.0
#define REST_NEAR 16
#define REST_LONG 256

enum { BASE, TRY, AGAIN };

/* The neighbours, in the order they are tried. */
enum { DEEPER, SHALLOWER, LARGER, SMALLER, MOVES };

#define STORES_MAX 32
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
	char store[96];
	struct tuner_setting setting;
} memory[STORES_MAX];		/* guarded by memory_lock, as is memory_next */
static unsigned int memory_next;

__attribute__((constructor)) static void mind_forks(void)
{
	os_at_fork(OS_FORK_TUNER, &memory_lock, NULL);
}

static uint64_t pack(struct tuner_setting setting)
{
	return (uint64_t)setting.size << 32 | setting.depth;
}

struct tuner_setting tuner_get(const struct tuner *tuner)
{
	uint64_t packed = atomic_load_explicit(&tuner->setting, memory_order_relaxed);

	return (struct tuner_setting){ (uint32_t)(packed >> 32), (uint32_t)packed };
}

static struct tuner_setting clamp(const struct tuner *tuner, struct tuner_setting setting)
{
	if (setting.size > tuner->size_max)
		setting.size = tuner->size_max;
	if (setting.size < tuner->size_min)
		setting.size = tuner->size_min;
	if (setting.depth > tuner->depth_max)
		setting.depth = tuner->depth_max;
	if ((uint64_t)setting.size * setting.depth > tuner->bytes_max)
		setting.depth = (uint32_t)(tuner->bytes_max / setting.size);
	if (!setting.depth)
		setting.depth = 1;
	return setting;
}

static void apply(struct tuner *tuner, struct tuner_setting setting)
{
	uint64_t flight = (uint64_t)setting.size * setting.depth;

	atomic_store_explicit(&tuner->setting, pack(setting), memory_order_relaxed);
	/* What is in flight now was sent under the old setting. */
	tuner->skip = flight;
	tuner->want = flight * WINDOW_ROUNDS > WINDOW_BYTES ? flight * WINDOW_ROUNDS : WINDOW_BYTES;
	tuner->start_ns = 0;
	atomic_store_explicit(&tuner->bytes, 0, memory_order_relaxed);
}

void tuner_init(struct tuner *tuner, const char *store, bool write, struct tuner_setting wished,
		struct tuner_limits limits)
{
	struct tuner_setting start = write ? START_WRITE : START_READ;

	if (limits.size_best)
		start = (struct tuner_setting){ limits.size_best, START_WRITE.depth };
	memset(tuner, 0, sizeof(*tuner));
	tuner->size_min = limits.size_least > SIZE_MIN ? limits.size_least : SIZE_MIN;
	if (tuner->size_min > limits.size_max)
		tuner->size_min = limits.size_max;
	/* Larger ones, then, but no more bytes. */
	for (; start.size < tuner->size_min && start.depth > 1; start.depth /= 2)
		start.size *= 2;
	tuner->size_max = limits.size_max;
	tuner->depth_max = limits.depth_max;
	tuner->bytes_max = limits.bytes_max;
	snprintf(tuner->store, sizeof(tuner->store), "%c %s", write ? 'w' : 'r', store);
	pthread_mutex_lock(&memory_lock);
	for (unsigned int i = 0; i < STORES_MAX; i++)
		if (!strcmp(memory[i].store, tuner->store)) {
			start = memory[i].setting;
			tuner->rest = REST / 2;
		}
	pthread_mutex_unlock(&memory_lock);
	if (wished.size) {
		tuner->fixed_size = true;
		tuner->size_min = tuner->size_max = start.size = wished.size;
	}
	if (wished.depth) {
		tuner->fixed_depth = true;
		start.depth = wished.depth;
	}
	tuner->base = clamp(tuner, start);
	apply(tuner, tuner->base);
}

static bool neighbour(const struct tuner *tuner, unsigned int move, struct tuner_setting *setting)
{
	struct tuner_setting next = tuner->base;

	switch (move) {
	case DEEPER:
		/* More in flight: where that many requests cannot be, larger ones. */
		if (next.depth * 2 <= tuner->depth_max || tuner->fixed_size)
			next.depth *= 2;
		else
			next.size *= 2;
		break;
	case SHALLOWER:
		next.depth /= 2;
		break;
	case LARGER:
		next.size *= 2;
		next.depth = tuner->fixed_depth ? next.depth : (next.depth + 1) / 2;
		break;
	case SMALLER:
		next.size /= 2;
		next.depth = tuner->fixed_depth ? next.depth : next.depth * 2;
		break;
	}
	if ((tuner->fixed_size && next.size != tuner->base.size) ||
	    (tuner->fixed_depth && next.depth != tuner->base.depth))
		return false;
	*setting = clamp(tuner, next);
	return pack(*setting) != pack(tuner->base);
}

/* Set out for the next neighbour that exists; false where none does. */
static bool set_out(struct tuner *tuner)
{
	struct tuner_setting next;

	for (; tuner->rejected < MOVES; tuner->rejected++, tuner->move++)
		if (neighbour(tuner, tuner->move % MOVES, &next)) {
			apply(tuner, next);
			tuner->phase = TRY;
			tuner->wins = 0;
			return true;
		}
	return false;
}

static void step(struct tuner *tuner, double rate)
{
	struct tuner_setting tried;
	double before, best;

	tuner->steps++;
	switch (tuner->phase) {
	case BASE:
		tuner->base_rate = rate;
		if (tuner->steps == 1 && !tuner->rest && rate >= NEAR) {
			tuner->near = true;
			tuner->rest = REST_NEAR;
		}
		if (tuner->rest && --tuner->rest) {
			apply(tuner, tuner->base);
			return;
		}
		if (tuner->rejected >= MOVES)
			tuner->rejected = 0;
		if (!set_out(tuner)) {
			tuner->rest = REST;
			apply(tuner, tuner->base);
		}
		return;
	case TRY:
		tuner->try_rate = rate;
		if (rate > tuner->base_rate * GAIN) {
			/* Promising: was it the setting, or the hour? Ask the base again. */
			apply(tuner, tuner->base);
			tuner->phase = AGAIN;
			return;
		}
		break;
	case AGAIN:
		before = tuner->base_rate;
		tuner->base_rate = rate;
		best = rate > before ? rate : before;
		if (tuner->try_rate > best * GAIN &&
		    neighbour(tuner, tuner->move % MOVES, &tried)) {
			if (!tuner->wins++ && tuner->try_rate < best * GAIN_CLEAR) {
				apply(tuner, tried);
				tuner->phase = TRY;
				return;
			}
			/* It pays. Go there, and on in the same direction. */
			tuner->base = tried;
			tuner->base_rate = tuner->try_rate;
			tuner->moves_kept++;
			tuner->rejected = 0;
			if (set_out(tuner))
				return;
			tuner->phase = BASE;
			apply(tuner, tuner->base);
			return;
		}
		break;
	}
	tuner->rejected++;
	tuner->move++;
	tuner->phase = BASE;
	if (tuner->near && !tuner->moves_kept)
		tuner->rest = REST_LONG;
	else if (tuner->rejected >= MOVES)
		tuner->rest = REST;
	apply(tuner, tuner->base);
}

void tuner_add(struct tuner *tuner, uint64_t bytes, uint64_t now_ns)
{
	uint64_t seen;

	if (tuner->fixed_size && tuner->fixed_depth)
		return;
	seen = atomic_fetch_add_explicit(&tuner->bytes, bytes, memory_order_relaxed) + bytes;
	if (seen < tuner->skip || atomic_flag_test_and_set_explicit(&tuner->busy,
								    memory_order_acquire))
		return;
	if (!tuner->start_ns) {
		tuner->start_ns = now_ns;
		tuner->start_bytes = seen;
	} else if (seen - tuner->start_bytes >= tuner->want && now_ns > tuner->start_ns &&
		   now_ns - tuner->start_ns >= WINDOW_NS) {
		step(tuner, (double)(seen - tuner->start_bytes) /
				    (double)(now_ns - tuner->start_ns));
	}
	atomic_flag_clear_explicit(&tuner->busy, memory_order_release);
}

void tuner_fini(struct tuner *tuner)
{
	unsigned int i;

	/* A setting that was ordered, or never measured, says nothing about the store. */
	if (tuner->fixed_depth || tuner->fixed_size || !tuner->steps)
		return;
	pthread_mutex_lock(&memory_lock);
	for (i = 0; i < STORES_MAX; i++)
		if (!strcmp(memory[i].store, tuner->store))
			break;
	if (i == STORES_MAX)
		i = memory_next++ % STORES_MAX;
	memcpy(memory[i].store, tuner->store, sizeof(memory[i].store));
	memory[i].setting = tuner->base;
	pthread_mutex_unlock(&memory_lock);
}

void tuner_forget(void)
{
	pthread_mutex_lock(&memory_lock);
	memset(memory, 0, sizeof(memory));
	pthread_mutex_unlock(&memory_lock);
}
