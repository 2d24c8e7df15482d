// llama.cpp as a worker of benchmarks.llama_cpp: it loads models once and answers requests.
//
//   llama_worker -m TARGET [--spec-type draft-dflash --spec-draft-model DRAFTER] OPTION...
//
// takes the options of llama-speculative-simple. It prints {"ready": true}, then an object for each
// line of standard input:
//
//   plain COUNT ID,ID,... [0]       COUNT greedy tokens, one at a time, ended by an end token if
//                                   there is no 0
//   drafted COUNT ID,ID,... [N,...] the same with drafts; given N, ..., round i accepts that many
//                                   drafts, whatever they are, and end tokens are ignored
//   logits PATH ID,ID,...           writes float32 logits [IDs, vocabulary] of all positions to PATH
//
// Seconds of prefill include the first token, seconds of decoding exclude it, as in modes.py.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "arg.h"
#include "common.h"
#include "llama.h"
#include "log.h"
#include "speculative.h"

struct clocks {
    double wall, busy;

    static clocks now() {
        timespec busy;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &busy);
        const auto wall = std::chrono::steady_clock::now().time_since_epoch();
        return {std::chrono::duration<double>(wall).count(), busy.tv_sec + busy.tv_nsec * 1e-9};
    }
};

static std::vector<llama_token> numbers(const std::string & text) {
    std::vector<llama_token> found;
    std::stringstream stream(text);
    for (std::string number; std::getline(stream, number, ',');) {
        found.push_back(std::stoi(number));
    }
    return found;
}

struct worker {
    llama_context * target;
    llama_context * drafter;
    common_speculative * drafting;
    int vocabulary;

    llama_token best(int row) const {
        const float * logits = llama_get_logits_ith(target, row);
        if (!logits) {
            throw std::runtime_error("there are no logits");
        }
        return std::max_element(logits, logits + vocabulary) - logits;
    }

    bool ends(llama_token id) const {
        return llama_vocab_is_eog(llama_model_get_vocab(llama_get_model(target)), id);
    }

    // Feed tokens at a position; the drafter's context gets them, too.
    void feed(const llama_token * ids, size_t count, int position, bool every, bool drafted) {
        const size_t step = llama_n_batch(target);
        for (size_t begin = 0; begin < count; begin += step) {
            common_batch batch(target);
            const size_t end = std::min(count, begin + step);
            for (size_t i = begin; i < end; ++i) {
                batch.add(ids[i], position + i, 0, every || i + 1 == count);
            }
            if (llama_process(target, LLAMA_PROCESS_TYPE_DECODE, batch.get())) {
                throw std::runtime_error("a batch was refused");
            }
            if (drafted && !common_speculative_process(drafting, batch)) {
                throw std::runtime_error("the drafter refused a batch");
            }
        }
    }

    void forget(int position) {
        llama_memory_seq_rm(llama_get_memory(target), 0, position, -1);
        if (drafter) {
            llama_memory_seq_rm(llama_get_memory(drafter), 0, position, -1);
        }
    }

    // Append the tokens of a draft-verify round to `all`; return how many there are.
    int round(std::vector<llama_token> & all, int most, const std::vector<llama_token> & accept, int i) {
        llama_tokens drafts;
        const llama_tokens known(all.begin(), all.end() - 1);
        const int position = known.size();
        common_speculative_get_draft_params(drafting, 0) = {true, most, position, all.back(), &known, &drafts};
        common_speculative_draft(drafting);
        drafts.resize(std::min<size_t>(drafts.size(), most - 1));
        if (drafter) {
            llama_memory_seq_rm(llama_get_memory(drafter), 0, position, -1);
        }
        llama_tokens block = {all.back()};
        block.insert(block.end(), drafts.begin(), drafts.end());
        feed(block.data(), block.size(), position, true, true);
        size_t accepted = 0;
        std::vector<llama_token> chosen;
        for (size_t row = 0; row < block.size(); ++row) {
            chosen.push_back(best(row));
        }
        if (accept.empty()) {
            while (accepted < drafts.size() && chosen[accepted] == drafts[accepted]) {
                accepted += 1;
            }
        } else {
            accepted = std::min<size_t>(accept[i % accept.size()], drafts.size());
        }
        common_speculative_accept(drafting, 0, accepted);
        for (size_t row = 0; row <= accepted; ++row) {
            all.push_back(row < accepted ? drafts[row] : chosen[row]);
            if (accept.empty() && ends(chosen[row])) {
                break;
            }
        }
        forget(position + 1 + accepted);
        return all.size() - 1 - position;
    }

    void generate(const std::vector<llama_token> & prompt, int count, bool drafted,
                  const std::vector<llama_token> & accept) {
        forget(0);
        const clocks started = clocks::now();
        std::vector<llama_token> all = prompt;
        feed(prompt.data(), prompt.size(), 0, false, drafted);
        all.push_back(best(-1));
        if (drafted) {
            common_speculative_begin(drafting, 0, prompt);
        }
        const clocks ready = clocks::now();
        const size_t total = prompt.size() + count;
        int rounds = 0;
        while (all.size() < total && !(accept.empty() && ends(all.back()))) {
            if (drafted) {
                round(all, total - all.size(), accept, rounds);
            } else {
                feed(&all.back(), 1, all.size() - 1, false, false);
                all.push_back(best(-1));
            }
            rounds += 1;
        }
        const clocks done = clocks::now();
        printf("{\"prefill_s\": %.9f, \"prefill_cpu_s\": %.9f, \"decode_s\": %.9f, \"decode_cpu_s\": %.9f,"
               " \"rounds\": %d, \"tokens\": [",
               ready.wall - started.wall, ready.busy - started.busy, done.wall - ready.wall,
               done.busy - ready.busy, rounds);
        for (size_t i = prompt.size(); i < all.size(); ++i) {
            printf("%s%d", i == prompt.size() ? "" : ", ", all[i]);
        }
        printf("]}\n");
    }

    void logits(const std::vector<llama_token> & ids, const std::string & path) {
        forget(0);
        feed(ids.data(), ids.size(), 0, true, false);
        std::ofstream out(path, std::ios::binary);
        for (size_t i = 0; i < ids.size(); ++i) {
            const char * row = reinterpret_cast<const char *>(llama_get_logits_ith(target, i));
            out.write(row, vocabulary * sizeof(float));
        }
        printf("{\"rows\": %zu}\n", out ? ids.size() : 0);
    }
};

int main(int argc, char ** argv) {
    common_params params;
    common_init();
    common_log_set_verbosity_thold(-1);
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SPECULATIVE)) {
        return 2;
    }
    const bool drafts = params.speculative.has_dft();
    if (drafts) {
        const auto limits = common_speculative_get_output_limits(
            params.n_batch, params.n_parallel, common_speculative_n_max(&params.speculative));
        params.n_outputs_max = limits.total;
        params.n_outputs_max_per_seq = limits.per_seq;
    }
    llama_backend_init();
    auto loaded = common_init_from_params(params);
    worker self = {loaded->context(), nullptr, nullptr, 0};
    if (!self.target) {
        return 1;
    }
    self.vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(loaded->model()));
    common_speculative_init_result_ptr init;
    if (drafts) {
        common_params own = common_base_params_to_speculative(params);
        init = common_speculative_init_from_params(own, loaded->model(), self.target);
        params.speculative.draft.ctx_tgt = self.target;
        params.speculative.draft.ctx_dft = self.drafter = init->context();
        self.drafting = common_speculative_init(params.speculative, 1);
        if (!self.drafting) {
            return 1;
        }
    }
    printf("{\"ready\": true}\n");
    fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
        std::stringstream words(line);
        std::string mode, first, ids, accept;
        words >> mode >> first >> ids >> accept;
        try {
            if (mode == "logits") {
                self.logits(numbers(ids), first);
            } else {
                self.generate(numbers(ids), std::stoi(first), mode == "drafted", numbers(accept));
            }
        } catch (const std::exception & error) {
            fprintf(stderr, "llama_worker: %s\n", error.what());
            return 1;
        }
        fflush(stdout);
    }
    if (self.drafting) {
        common_speculative_free(self.drafting);
    }
    return 0;
}
