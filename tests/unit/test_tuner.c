/* SPDX-License-Identifier: MIT */
/*
 * The knee finder, fed by made-up stores on a made-up clock, so that every run is the same: a
 * wire of `rate`, a fixed latency behind it, and a knee beyond which the wire is 30 % slower.
 */
#include "engine/tuner.h"
#include "test.h"

#define MIB (1ull << 20)
#define IN_FLIGHT_MAX 4096

struct store {
	double rate;		/* bytes a nanosecond */
	uint64_t latency_ns;
	uint64_t knee;		/* bytes in flight; 0: none */
	double noise;		/* share of the rate, up and down */
	uint64_t noise_ns;	/* how long one such spell lasts */
};

static const struct store disk = { .rate = 3.0, .latency_ns = 100000, .knee = 8 * MIB };
static const struct store far = { .rate = 8.0, .latency_ns = 10000000 };

static struct tuner tuner;
static uint64_t seed = 1;
static double whole_rate;	/* of the last play(), from its start to its end */

static double random_share(void)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (double)(seed >> 11) * 0x1p-53;
}

static uint64_t in_flight(struct tuner_setting setting)
{
	return (uint64_t)setting.size * setting.depth;
}

static void begin(const char *name, bool write, struct tuner_setting wished)
{
	tuner_init(&tuner, name, write, wished,
		   (struct tuner_limits){ .size_max = 4 * MIB, .depth_max = 256,
					  .bytes_max = 128 * MIB });
}

/* Move `total` bytes; returns the rate of the last half. */
static double play(const struct store *store, uint64_t total)
{
	static struct {
		uint64_t due, size;
	} queue[IN_FLIGHT_MAX];
	uint64_t now = 1, wire = 0, flying = 0, done = 0, spell = 0, middle_ns = 0, middle = 0;
	unsigned int first = 0, count = 0;
	double factor = 1;

	while (done < total) {
		struct tuner_setting setting = tuner_get(&tuner);

		CHECK(in_flight(setting) <= tuner.bytes_max && setting.depth >= 1);
		CHECK(setting.size >= tuner.size_min && setting.size <= tuner.size_max);
		while (count < setting.depth && count < IN_FLIGHT_MAX) {
			unsigned int at = (first + count++) % IN_FLIGHT_MAX;
			double rate = store->rate;

			flying += setting.size;
			if (store->knee && flying > store->knee)
				rate *= 0.7;
			if (store->noise && now / store->noise_ns != spell) {
				spell = now / store->noise_ns;
				factor = 1 + store->noise * (2 * random_share() - 1);
			}
			wire = (wire > now ? wire : now) +
			       (uint64_t)((double)setting.size / (rate * factor));
			queue[at].due = wire + store->latency_ns;
			queue[at].size = setting.size;
		}
		now = queue[first].due;
		done += queue[first].size;
		flying -= queue[first].size;
		tuner_add(&tuner, queue[first].size, now);
		first = (first + 1) % IN_FLIGHT_MAX;
		count--;
		if (!middle_ns && done >= total / 2) {
			middle_ns = now;
			middle = done;
		}
	}
	whole_rate = (double)done / (double)now;
	return (double)(done - middle) / (double)(now - middle_ns);
}

TEST(a_disk_with_a_knee_settles_at_it)
{
	double rate;

	begin("disk", false, (struct tuner_setting){ 0, 0 });
	rate = play(&disk, 16ull << 30);
	printf("%u x %u\n", tuner.base.size, tuner.base.depth);
	CHECK(in_flight(tuner.base) <= 16 * MIB);
	CHECK(rate >= 0.9 * disk.rate);
}

/* A model of 1.2 GB is read once; what is learnt about the disk meanwhile is of no use to it. */
TEST(a_short_job_does_not_pay_for_looking_around)
{
	double at_the_knee;

	begin("disk", false, (struct tuner_setting){ MIB, 8 });
	play(&disk, 1150 * MIB);
	at_the_knee = whole_rate;
	begin("disk", false, (struct tuner_setting){ 0, 0 });
	play(&disk, 1150 * MIB);
	printf("%.2f %% lost, %u windows\n", 100 * (1 - whole_rate / at_the_knee), tuner.steps);
	CHECK(tuner.steps >= 8 && whole_rate >= 0.995 * at_the_knee);
}

TEST(a_far_store_climbs_to_many_requests_in_flight)
{
	double rate;

	begin("far", false, (struct tuner_setting){ 0, 0 });
	rate = play(&far, 16ull << 30);
	printf("%u x %u\n", tuner.base.size, tuner.base.depth);
	CHECK(in_flight(tuner.base) >= 64 * MIB);
	CHECK(rate >= 0.9 * far.rate);
}

TEST(a_far_store_is_learnt_within_a_few_gigabytes)
{
	begin("far", false, (struct tuner_setting){ 0, 0 });
	play(&far, 4ull << 30);
	CHECK(in_flight(tuner.base) >= 64 * MIB);
}

TEST(a_start_beyond_the_knee_comes_down_to_it)
{
	struct store small = disk;

	/* The start is 8 MiB, twice too much. Far beyond a knee all is flat: nothing to climb. */
	small.knee = 4 * MIB;
	begin("x", false, (struct tuner_setting){ 0, 0 });
	CHECK(play(&small, 32ull << 30) >= 0.9 * small.rate);
	CHECK(in_flight(tuner.base) <= 4 * MIB);
}

TEST(noise_of_three_percent_does_not_make_it_wander)
{
	/* Every setting is as good as any other here, so each move kept is a mistake. */
	struct store flat = { .rate = 3.0, .latency_ns = 20000, .noise = 0.03 };
	static const uint64_t spells[] = { 1000000, 10000000, 100000000 };

	for (unsigned int i = 0; i < 3; i++)
		for (unsigned int s = 1; s <= 5; s++) {
			flat.noise_ns = spells[i];
			seed = s;
			begin("flat", false, (struct tuner_setting){ 0, 0 });
			play(&flat, 64ull << 30);
			CHECK(tuner.moves_kept <= 2);
			CHECK(in_flight(tuner.base) >= 2 * MIB);
			CHECK(in_flight(tuner.base) <= 32 * MIB);
		}
}

TEST(noise_does_not_hide_the_knee)
{
	struct store noisy = disk, noisy_far = far;

	noisy.noise = noisy_far.noise = 0.03;
	noisy.noise_ns = noisy_far.noise_ns = 5000000;
	for (unsigned int s = 1; s <= 5; s++) {
		seed = s;
		begin("noisy", false, (struct tuner_setting){ 0, 0 });
		play(&noisy, 16ull << 30);
		CHECK(in_flight(tuner.base) <= 16 * MIB);
		begin("noisy far", false, (struct tuner_setting){ 0, 0 });
		play(&noisy_far, 16ull << 30);
		CHECK(in_flight(tuner.base) >= 64 * MIB);
	}
}

TEST(what_is_fixed_stays)
{
	struct tuner_setting setting;

	begin("a", false, (struct tuner_setting){ 512 << 10, 0 });
	play(&far, 8ull << 30);
	setting = tuner_get(&tuner);
	CHECK_EQ(setting.size, 512 << 10);
	CHECK(tuner.base.depth >= 64);

	begin("b", false, (struct tuner_setting){ 0, 5 });
	play(&far, 2ull << 30);
	setting = tuner_get(&tuner);
	CHECK_EQ(setting.depth, 5);

	begin("c", false, (struct tuner_setting){ 2 * MIB, 3 });
	play(&far, 2ull << 30);
	setting = tuner_get(&tuner);
	CHECK_EQ(setting.size, 2 * MIB);
	CHECK_EQ(setting.depth, 3);
	CHECK_EQ(tuner.steps, 0);
}

TEST(a_fixed_depth_still_finds_the_size)
{
	/* penstock.h on request_size: "0: found at run time", whatever the depth is. */
	begin("far", false, (struct tuner_setting){ 0, 16 });
	play(&far, 8ull << 30);
	CHECK_EQ(tuner_get(&tuner).depth, 16);
	CHECK_EQ(tuner.base.size, 4 * MIB);
}

TEST(a_store_is_remembered_by_name_and_direction)
{
	struct tuner_setting found, fresh;

	tuner_forget();
	begin("far", false, (struct tuner_setting){ 0, 0 });
	fresh = tuner_get(&tuner);
	play(&far, 16ull << 30);
	found = tuner.base;
	tuner_fini(&tuner);
	begin("far", false, (struct tuner_setting){ 0, 0 });
	CHECK_EQ(in_flight(tuner_get(&tuner)), in_flight(found));
	CHECK_EQ(tuner_get(&tuner).size, found.size);
	begin("far", true, (struct tuner_setting){ 0, 0 });
	CHECK_EQ(in_flight(tuner_get(&tuner)), in_flight(fresh));
	begin("near", false, (struct tuner_setting){ 0, 0 });
	CHECK_EQ(in_flight(tuner_get(&tuner)), in_flight(fresh));
	tuner_forget();
	begin("far", false, (struct tuner_setting){ 0, 0 });
	CHECK_EQ(in_flight(tuner_get(&tuner)), in_flight(fresh));
}

TEST(what_was_ordered_or_never_measured_is_not_remembered)
{
	struct tuner_setting fresh;

	tuner_forget();
	begin("x", false, (struct tuner_setting){ 0, 0 });
	fresh = tuner_get(&tuner);
	tuner_fini(&tuner);
	begin("x", false, (struct tuner_setting){ 0, 100 });
	play(&far, 4ull << 30);
	tuner_fini(&tuner);
	begin("x", false, (struct tuner_setting){ 0, 0 });
	CHECK_EQ(in_flight(tuner_get(&tuner)), in_flight(fresh));
}

TEST(more_stores_than_it_can_remember_do_no_harm)
{
	char name[16];

	for (int i = 0; i < 100; i++) {
		snprintf(name, sizeof(name), "store %d", i);
		begin(name, i & 1, (struct tuner_setting){ 0, 0 });
		play(&disk, 512 * MIB);
		tuner_fini(&tuner);
	}
	begin("store 99", true, (struct tuner_setting){ 0, 0 });
	CHECK(in_flight(tuner_get(&tuner)) <= 16 * MIB);
}

TEST(limits_are_kept_from_the_first_setting_on)
{
	static const struct tuner_limits limits[] = {
		{ 0, 0, 4 * MIB, 256, 128 * MIB }, { 0, 0, 4 * MIB, 256, 4 * MIB },
		{ 0, 0, MIB, 2, 128 * MIB },	   { 0, 0, 64 << 10, 256, 64 << 10 },
		{ 0, 0, 128 << 10, 4, MIB },	   { 0, 0, 4 * MIB, 1, 128 * MIB },
		{ 0, 0, 32 << 10, 64, 48 << 10 },  { 2 * MIB, 4 * MIB, 16 * MIB, 64, 128 * MIB },
	};

	for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
		tuner_forget();
		tuner_init(&tuner, "far", false, (struct tuner_setting){ 0, 0 }, limits[i]);
		/* play() checks the bytes and the size at each step. */
		play(&far, 2ull << 30);
		CHECK(tuner_get(&tuner).depth <= limits[i].depth_max);
		CHECK_EQ(tuner_get(&tuner).size & (tuner_get(&tuner).size - 1), 0);
		tuner_fini(&tuner);
	}
	/* What was found with much room must not break a smaller promise later. */
	tuner_init(&tuner, "far", false, (struct tuner_setting){ 0, 0 },
		   (struct tuner_limits){ .size_max = 64 << 10, .depth_max = 8,
					  .bytes_max = 128 << 10 });
	play(&far, MIB);
}

TEST_MAIN
