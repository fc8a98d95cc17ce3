// Emulates a GPU with CPU threads. The device's memory is a file that all ranks map at the same address, so a pointer is valid in
// every rank.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace emulator {
struct Index { unsigned x; };
struct Here { Index block, thread, grid; pthread_barrier_t* barrier; };
inline thread_local Here here;
struct Kernel {
    void (*entry)(void**, void*);
    size_t shared;
    unsigned threads, parts;
};

struct Launch {
    Kernel kernel;
    unsigned blocks;
    unsigned stagger;  // milliseconds by which each block begins later than the one before
    std::vector<unsigned long long> words;  // output, sources, job

    void run() {
        std::vector<void*> parameters;
        for (unsigned i = 0; i < 2 + kernel.parts; ++i) parameters.push_back(&words[i]);
        std::vector<std::vector<unsigned long long>> memory(blocks);
        std::vector<pthread_barrier_t> barriers(blocks);
        std::vector<std::thread> threads;
        for (unsigned b = 0; b < blocks; ++b) {
            memory[b].resize(kernel.shared / 8 + 1);
            pthread_barrier_init(&barriers[b], nullptr, kernel.threads);
            for (unsigned t = 0; t < kernel.threads; ++t)
                threads.emplace_back([&, b, t] {
                    std::this_thread::sleep_for(std::chrono::milliseconds(stagger * b));
                    here = Here{{b}, {t}, {blocks}, &barriers[b]};
                    kernel.entry(parameters.data(), memory[b].data());
                });
        }
        for (auto& thread : threads) thread.join();
        for (auto& barrier : barriers) pthread_barrier_destroy(&barrier);
    }
};

// Commands: `launch STREAM NAME BLOCKS STAGGER WORD…` as often as needed; `go` runs all streams at once, each in its order, and
// answers `done`.
inline int serve(int, char** arguments, const std::map<std::string, Kernel>& kernels) {
    const size_t bytes = std::strtoull(arguments[2], nullptr, 0);
    void* const address = (void*)std::strtoull(arguments[3], nullptr, 0);
    const int file = open(arguments[1], O_RDWR);
    void* const at = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
    if (file < 0 || at != address) {
        std::perror("the device's memory");
        return 1;
    }
    std::map<unsigned, std::vector<Launch>> streams;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream in(line);
        std::string command, name;
        unsigned stream;
        in >> command;
        if (command == "launch") {
            Launch launch;
            in >> stream >> name >> launch.blocks >> launch.stagger;
            const auto kernel = kernels.find(name);
            if (kernel == kernels.end()) {
                std::cerr << "there is no kernel " << name << "\n";
                return 1;
            }
            launch.kernel = kernel->second;
            for (unsigned long long word; in >> word;) launch.words.push_back(word);
            streams[stream].push_back(launch);
        } else if (command == "go") {
            std::vector<std::thread> running;
            for (auto& [number, launches] : streams)
                running.emplace_back([&launches = launches] {
                    for (auto& launch : launches) launch.run();
                });
            for (auto& stream : running) stream.join();
            streams.clear();
            std::cout << "done" << std::endl;
        }
    }
    return 0;
}
}  // namespace emulator
